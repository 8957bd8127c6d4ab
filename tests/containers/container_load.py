"""Clients that keep the service under load."""

import asyncio
import itertools
from typing import Self

from quire.client.async_client import AsyncClient
from quire.client.errors import QuireError
from quire.client.outputs import RequestOutput
from quire.client.sampling_params import SamplingParams

_OPENINGS = ("Return a list of", "Open the file", "Raised when", "This class", "Convert a")


class Load:
    """`num_clients` clients, each with one request after the other, within the context. On exit
    waits for running requests. Does not retry."""

    def __init__(self, target: str, num_clients: int = 8, max_tokens: int = 48) -> None:
        self.outputs: list[RequestOutput] = []
        self.failures: list[QuireError] = []
        self._client = AsyncClient(target, resume_timeout_s=0)
        self._num_clients = num_clients
        self._max_tokens = max_tokens
        self._seeds = itertools.count()
        self._stopping = False
        self._clients: list[asyncio.Task[None]] = []

    @property
    def num_done(self) -> int:
        return len(self.outputs)

    async def __aenter__(self) -> Self:
        self._clients = [asyncio.create_task(self._run_client()) for _ in range(self._num_clients)]
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._stopping = True
        await asyncio.gather(*self._clients)
        await self._client.close()

    async def _run_client(self) -> None:
        while not self._stopping:
            seed = next(self._seeds)
            prompt = f"{_OPENINGS[seed % len(_OPENINGS)]} {seed}"
            params = SamplingParams(
                temperature=0.8, max_tokens=self._max_tokens, seed=seed, ignore_eos=True
            )
            try:
                self.outputs.append(await self._client.generate(prompt, params, timeout_s=60))
            except QuireError as error:
                self.failures.append(error)
                # Keeps a client from retrying in a tight loop.
                await asyncio.sleep(error.retry_after_s or 0.1)
