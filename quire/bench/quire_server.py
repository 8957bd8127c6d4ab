"""Streams of a Quire server under load."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import cycle
from typing import Final

from quire.bench.server import Message, RequestFailed
from quire.bench.workload import BenchRequest
from quire.client.async_client import AsyncClient
from quire.client.decode_counts import DecodeCounts
from quire.client.errors import QuireError
from quire.client.operations import Operations
from quire.client.sampling_params import SamplingParams
from quire.client.targets import Targets
from quire.service.tls import TLS

_STATUS_TIMEOUT_S: Final = 5.0


class QuireServer:
    """Gateways that receive requests round-robin. Failures are counted, not retried."""

    name = "quire"

    def __init__(
        self,
        target: str,
        model: str | None,
        temperature: float,
        ignore_eos: bool,
        api_key: str | None = None,
        tls: TLS | None = None,
        scheduler: str | None = None,
    ) -> None:
        """`scheduler` is the address of the one whose workers are counted. TypeError or ValueError
        for an invalid target or API key."""
        self._clients = [
            AsyncClient(address, api_key=api_key, tls=tls, resume_timeout_s=0)
            for address in Targets(target).addresses
        ]
        self._next_client = cycle(self._clients)
        self._model = model
        self._temperature = temperature
        self._ignore_eos = ignore_eos
        self._operations = None if scheduler is None else Operations(scheduler, tls)

    async def stream(self, request: BenchRequest) -> AsyncGenerator[Message, None]:
        params = SamplingParams(
            temperature=self._temperature,
            max_tokens=request.max_tokens,
            ignore_eos=self._ignore_eos,
        )
        deltas = next(self._next_client).stream_generate(
            request.prompt_token_ids, params, model=self._model
        )
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    token_ids = [id_ for output in delta.outputs for id_ in output.token_ids]
                    counted = None if delta.usage is None else delta.usage.completion_tokens
                    yield Message(len(token_ids), token_ids, counted)
        except QuireError as error:
            raise RequestFailed(error.reason or error.code.name) from error

    async def decode_counts(self) -> DecodeCounts | None:
        if self._operations is None:
            return None
        try:
            shards = await asyncio.to_thread(self._operations.statuses, False, _STATUS_TIMEOUT_S)
            for failure in shards.failures.values():
                raise failure
        except QuireError as error:
            raise RequestFailed(f"the scheduler: {error}") from error
        return DecodeCounts.of([w for one in shards.statuses.values() for w in one.workers])

    async def close(self) -> None:
        if self._operations is not None:
            self._operations.close()
        for client in self._clients:
            await client.close()
