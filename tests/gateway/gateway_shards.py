"""Several shards, each with a scripted leader of its own, and gateways in front of them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
from gateway_fake_scheduler import FakeScheduler, StreamRequest
from gateway_stack import Stack
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2
from waiting import until

from gateway_svc.server import Gateway
from gateway_svc.settings import GatewaySettings
from quire.internal.v1 import scheduler_pb2 as pb
from quire.service.channels import channel_options

Settings = Callable[..., GatewaySettings]


class Cluster:
    """One leader per shard. Gateways know a shard from `grow` on, the first from the start."""

    def __init__(self, schedulers: list[FakeScheduler], ports: list[int]) -> None:
        self.schedulers = schedulers
        self.ports = ports
        self.num_shards = 1
        self.num_workers = [2] * len(schedulers)
        self.num_live = [0] * len(schedulers)

    def address(self, shard: int) -> str:
        return f"127.0.0.1:{self.ports[shard]}"

    @property
    def state(self) -> pb.ClusterState:
        return pb.ClusterState(
            shards=[
                pb.ShardState(
                    leader=self.address(shard) if self.schedulers[shard].leads else "",
                    num_workers=self.num_workers[shard],
                    num_live=self.num_live[shard],
                )
                for shard in range(self.num_shards)
            ]
        )

    def report(self) -> None:
        """Let every leader send the state of all shards, also to gateways that connect later."""
        for scheduler in self.schedulers[: self.num_shards]:
            scheduler.cluster = self.state
            if scheduler.connected.is_set():
                scheduler.send(cluster=self.state)

    def grow(self, num_shards: int) -> None:
        self.num_shards = num_shards
        self.report()

    async def known_to(self, stack: Stack) -> None:
        """Wait until a gateway is connected to all leaders and knows their loads."""
        requests = stack.gateway.scheduler.requests
        with_workers = [number for number in self.num_workers[: self.num_shards] if number]

        def are_known() -> bool:
            num_usable = sum(load.is_usable for load in requests._loads.all())
            return (requests.num_shards, num_usable) == (self.num_shards, len(with_workers))

        await until(are_known, "the shards")

    async def next_submission(self) -> tuple[FakeScheduler, pb.Submission]:
        """The next submission to any shard, and the shard."""
        await until(lambda: any(not s.submissions.empty() for s in self.schedulers), "a submission")
        scheduler = next(s for s in self.schedulers if not s.submissions.empty())
        return scheduler, scheduler.submissions.get_nowait()

    def other_than(self, scheduler: FakeScheduler) -> FakeScheduler:
        return next(s for s in self.schedulers[: self.num_shards] if s is not scheduler)


@asynccontextmanager
async def cluster_of(num_shards: int) -> AsyncIterator[Cluster]:
    schedulers = [FakeScheduler(shard) for shard in range(num_shards)]
    for scheduler in schedulers:
        # Those of different shards are not comparable.
        scheduler.epoch = 1000 - 100 * scheduler.shard
    ports = [await scheduler.start() for scheduler in schedulers]
    try:
        yield Cluster(schedulers, ports)
    finally:
        for scheduler in schedulers:
            await scheduler.stop()


@asynccontextmanager
async def gateway_of(settings: GatewaySettings, cluster: Cluster) -> AsyncIterator[Stack]:
    """A gateway; it need not be connected yet."""
    gateway = Gateway(settings)
    address = await gateway.start()
    async with AsyncExitStack() as resources:
        resources.push_async_callback(gateway.stop)
        channel = grpc.aio.insecure_channel(address, options=channel_options())
        await resources.enter_async_context(channel)
        stack = Stack(gateway, cluster.schedulers[0], cluster.ports[0], address, channel)
        await until(lambda: "tokenizer" not in gateway.health.failing, "the tokenizer")
        yield stack
        await asyncio.wait_for(gateway.calls.wait_until_idle(), 5)
        await until(stack.is_idle, "the ends of the calls")


def fail(
    scheduler: FakeScheduler,
    request: StreamRequest,
    code: grpc.StatusCode,
    reason: str,
    retry_s: int | None = None,
    **metadata: str,
) -> None:
    """Fail a request with a reason, as schedulers do."""
    details = [any_pb2.Any()]
    details[0].Pack(error_details_pb2.ErrorInfo(reason=reason, domain="quire", metadata=metadata))
    if retry_s is not None:
        details.append(any_pb2.Any())
        delay = duration_pb2.Duration(seconds=retry_s)
        details[1].Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    scheduler.fail(request, code, details=details)


def send_to(scheduler: FakeScheduler, request: StreamRequest, shard: int) -> None:
    """Fail a request because it belongs to another shard."""
    fail(scheduler, request, grpc.StatusCode.ABORTED, "OTHER_SHARD", shard=str(shard))
