"""A real scheduler and a worker with a real model, in this process, over real gRPC and Redis."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from scheduler_stack import Gateway, Received, ReceivedChoice, Stack
from waiting import until
from worker_driver import served

from quire.internal.v1 import logits_pb2, scheduler_pb2
from scheduler_svc.core.stats import LaneStats
from worker_svc.runner.step_runner import LoadedRunner


@dataclass
class Request:
    prompt: list[int]
    max_tokens: int
    seed: int
    n: int = 1
    # Fields of ResolvedParams.
    params: dict[str, Any] = field(default_factory=dict)
    logits: logits_pb2.LogitsParams | None = None

    def submission(self, request_id: str) -> scheduler_pb2.Submission:
        """`request_id` is none that Redis knows: that request would be attached to."""
        changes = self.logits or logits_pb2.LogitsParams()
        values = {"top_p": 1, **self.params}
        return scheduler_pb2.Submission(
            request_id=request_id,
            prompt_token_ids=self.prompt,
            n=self.n,
            digest=request_id.encode(),
            params=scheduler_pb2.ResolvedParams(
                seed=self.seed,
                max_tokens=self.max_tokens,
                logits_params=changes.SerializeToString(deterministic=True),
                **values,
            ),
        )


@dataclass
class Outcome:
    """The tokens of every choice of every request, their log-probabilities, and the counts."""

    token_ids: list[list[list[int]]]
    # By request and choice: entries of a token id, a log-probability and a rank.
    logprobs: list[list[list[tuple[int, float, int]]]]
    prompt_logprobs: list[list[tuple[int, float, int]]]
    stats: LaneStats


class _ModelGateway(Gateway):
    """Receives the tokens of a model, which the simulated worker does not know."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.logprobs: dict[tuple[int, int], bytes] = {}
        self.prompt_logprobs: dict[int, bytes] = {}

    def _take_tokens(self, deltas: scheduler_pb2.TokenDeltas) -> None:
        tokens = iter(deltas.token_ids)
        at = 0
        widths = deltas.num_logprobs or [0] * len(deltas.attachments)
        for attachment, choice, first, count, width in zip(
            deltas.attachments,
            deltas.choices,
            deltas.first_indices,
            deltas.num_tokens,
            widths,
            strict=True,
        ):
            token_ids = self.received[attachment].choices[choice].token_ids
            assert first == len(token_ids), "each token is sent once"
            token_ids += [next(tokens) for _ in range(count)]
            size = count * width * struct.calcsize("<IfI")
            known = self.logprobs.get((attachment, choice), b"")
            self.logprobs[attachment, choice] = known + deltas.logprobs[at : at + size]
            at += size
        for found in deltas.prompt_logprobs:
            self.prompt_logprobs[deltas.attachments[found.entry]] = found.logprobs

    async def run(self, requests: list[Request]) -> list[Received]:
        """Submit all at once, and wait for their ends."""
        for request in requests:
            choices = [ReceivedChoice() for _ in range(request.n)]
            await self._submit(Received(request.submission(uuid4().hex), choices))
        return await self.wait_ended()


async def outcome(
    redis_url: str, sockets: Path, loaded: LoadedRunner, requests: list[Request], **settings: object
) -> Outcome:
    """Run the requests, all at once, on a stack with this runner alone."""
    async with _running(redis_url, sockets, loaded, settings) as (stack, gateway):
        received = await gateway.run(requests)
        assert not [one.failure for one in received if one.failure]
        keys = [(at, choice) for at, one in enumerate(requests, 1) for choice in range(one.n)]
        entries = {key: _entries(gateway.logprobs.get(key, b"")) for key in keys}
        return Outcome(
            [[choice.token_ids for choice in one.choices] for one in received],
            [
                [entries[at, choice] for choice in range(one.n)]
                for at, one in enumerate(requests, 1)
            ],
            [_entries(gateway.prompt_logprobs.get(at, b"")) for at, _ in enumerate(requests, 1)],
            stack.only_lane.stats,
        )


@asynccontextmanager
async def _running(
    redis_url: str, sockets: Path, loaded: LoadedRunner, settings: dict[str, object]
) -> AsyncIterator[tuple[Stack, _ModelGateway]]:
    async with served(loaded) as worker:
        stack = Stack(redis_url, sockets, {"workers": worker.address, **settings})
        stack.start_scheduler()
        try:
            await until(lambda: stack.member.is_leading and stack.engine.lanes, "the worker's lane")
            gateway = _ModelGateway(stack.channel)
            stack.gateways.append(gateway)
            await gateway.start()
            await until(lambda: gateway.hello is not None, "the scheduler's hello")
            yield stack, gateway
        finally:
            await asyncio.shield(stack.stop())


def _entries(packed: bytes) -> list[tuple[int, float, int]]:
    return list(struct.iter_unpack("<IfI", packed))
