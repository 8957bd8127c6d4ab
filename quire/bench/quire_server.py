"""Quire's own streams under load."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from quire.async_client import AsyncClient
from quire.bench.server import Message, RequestFailed
from quire.bench.workload import BenchRequest
from quire.errors import QuireError
from quire.sampling import SamplingParams


class QuireServer:
    """A gateway. What breaks is not taken up again: it is to be counted."""

    name = "quire"

    def __init__(
        self, target: str, model: str | None, temperature: float, ignore_eos: bool
    ) -> None:
        """TypeError or ValueError for a target that is no address."""
        self._client = AsyncClient(target, resume_timeout_s=0)
        self._model = model
        self._temperature = temperature
        self._ignore_eos = ignore_eos

    async def stream(self, request: BenchRequest) -> AsyncGenerator[Message, None]:
        params = SamplingParams(
            temperature=self._temperature,
            max_tokens=request.max_tokens,
            ignore_eos=self._ignore_eos,
        )
        deltas = self._client.stream_generate(request.prompt_token_ids, params, model=self._model)
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    token_ids = [id_ for output in delta.outputs for id_ in output.token_ids]
                    counted = None if delta.usage is None else delta.usage.completion_tokens
                    yield Message(len(token_ids), token_ids, counted)
        except QuireError as error:
            raise RequestFailed(error.reason or error.code.name) from error

    async def close(self) -> None:
        await self._client.close()
