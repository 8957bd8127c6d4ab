"""A gateway, the scheduler behind it, and a client in front of it."""

from dataclasses import dataclass

import grpc
from gateway_fake_scheduler import FakeScheduler
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from gateway_svc.scheduler.multiplexer import Multiplexer
from gateway_svc.server import Gateway
from quire.v1 import (
    beam_search_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    model_pb2_grpc,
    tokenizer_pb2_grpc,
)


@dataclass
class Stack:
    gateway: Gateway
    scheduler: FakeScheduler
    scheduler_port: int
    address: str
    channel: grpc.aio.Channel

    def __post_init__(self) -> None:
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.beam_search = beam_search_pb2_grpc.BeamSearchServiceStub(self.channel)
        self.tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(self.channel)
        self.models = model_pb2_grpc.ModelServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    async def wait_for_status(self, status: "health_pb2.HealthCheckResponse.ServingStatus") -> None:
        request = health_pb2.HealthCheckRequest(service="ready")
        # On a busy machine the first attempt to connect may take longer than its 100 ms.
        async for response in self.health.Watch(request, wait_for_ready=True):
            if response.status == status:
                return

    def encode(self, text: str) -> list[int]:
        model = self.gateway.served.get(None)
        return list(model.files.tokenizer.encode(text, add_special_tokens=False).ids)

    async def check_next_request(self) -> None:
        """Serve a request; all parts sent to the scheduler before it have arrived then."""
        call = self.inference.Generate(inference_pb2.GenerateRequest(text="The"))
        await self.scheduler.serve_one(self.encode("fox"))
        assert (await call).choices[0].text == "fox"

    def is_idle(self) -> bool:
        return self.gateway.scheduler.requests.is_idle and not self.gateway.calls.num_live


def shard_requests() -> Multiplexer:
    """The requests of one shard, without a router: streams keep their failures."""
    return Multiplexer(10, 30, lambda: None, lambda stream, error: error)


def info_of(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    """The error's reason and metadata."""
    info = error_details_pb2.ErrorInfo()
    status = rpc_status.from_call(error)
    assert status is not None
    assert any(detail.Unpack(info) for detail in status.details), status
    return info


def field_of(error: grpc.aio.AioRpcError) -> str:
    """The invalid field that the error names."""
    status = rpc_status.from_call(error)
    assert status is not None
    request = error_details_pb2.BadRequest()
    assert any(detail.Unpack(request) for detail in status.details)
    return str(request.field_violations[0].field)
