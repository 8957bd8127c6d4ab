"""Quire's own streams under load."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import cycle

from quire.async_client import AsyncClient
from quire.bench.server import Message, RequestFailed
from quire.bench.workload import BenchRequest
from quire.errors import QuireError
from quire.sampling import SamplingParams
from quire.targets import Targets


class QuireServer:
    """Gateways, each of which gets the next request in turn. What breaks is not taken up again: it
    is to be counted."""

    name = "quire"

    def __init__(
        self, target: str, model: str | None, temperature: float, ignore_eos: bool
    ) -> None:
        """TypeError or ValueError for a target that is no address."""
        self._clients = [
            AsyncClient(address, resume_timeout_s=0) for address in Targets(target).addresses
        ]
        self._turns = cycle(self._clients)
        self._model = model
        self._temperature = temperature
        self._ignore_eos = ignore_eos

    async def stream(self, request: BenchRequest) -> AsyncGenerator[Message, None]:
        params = SamplingParams(
            temperature=self._temperature,
            max_tokens=request.max_tokens,
            ignore_eos=self._ignore_eos,
        )
        deltas = next(self._turns).stream_generate(
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

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
