"""The gateway's processor time per token and per request, with a simulated worker."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.report import Cell
from benchmarks.scheduler.proc import cpu_s
from quire.client.async_client import AsyncClient
from quire.client.sampling_params import SamplingParams
from quire.launcher.stack import LocalStack

_INTERVAL = 4
STREAMED = "a token of a stream, at the gateway"
JOINED = f"a token of a stream that receives {_INTERVAL} together, at the gateway"
UNARY = "a token of a unary call, at the gateway"
REQUEST = "a request, at the gateway"
_MODEL = Path(__file__).parents[2] / "demo" / "model"
_NUM_REQUESTS = 256
_PROMPT_TOKENS = 512
_SHORT, _LONG = 16, 128
_FIRST_TOKEN_ID, _LAST_TOKEN_ID = 300, 1000
_SETTINGS = {
    "QUIRE_WORKER_ENGINE": "sim",
    "QUIRE_WORKER_SIM_STEP_MS": "60",
    "QUIRE_WORKER_SIM_TOKEN_US": "0",
    "QUIRE_WORKER_MAX_NUM_SEQS": str(_NUM_REQUESTS),
    "QUIRE_WORKER_MAX_MODEL_LEN": "1024",
    "QUIRE_WORKER_NUM_BLOCKS": "20000",
    "QUIRE_WORKER_MAX_NUM_BATCHED_TOKENS": "16384",
    "QUIRE_SCHEDULER_MAX_NUM_BATCHED_TOKENS": "16384",
}
_Call = Callable[[AsyncClient, list[int], SamplingParams], Awaitable[None]]


def gateway_costs() -> list[dict[str, Cell]]:
    streamed, unary, request = _measured(interval=1)
    joined, _, _ = _measured(_INTERVAL)
    return [
        {"what": STREAMED, "gateway_ms": streamed},
        {"what": JOINED, "gateway_ms": joined},
        {"what": UNARY, "gateway_ms": unary},
        {"what": REQUEST, "gateway_ms": request},
    ]


def _measured(interval: int) -> tuple[float, float, float]:
    settings = {**_SETTINGS, "QUIRE_GATEWAY_STREAM_INTERVAL": str(interval)}
    with LocalStack(str(_MODEL), settings=settings) as stack:
        [gateway] = stack.processes("gateway")
        return asyncio.run(_costs(stack.address, gateway.pid))


async def _costs(address: str, pid: int) -> tuple[float, float, float]:
    """Milliseconds of a token of a stream, of one of a unary call, and of a request."""
    async with AsyncClient(address) as client:
        # A warm-up.
        await _used_s(client, pid, _stream, _SHORT)
        streamed = await _used_s(client, pid, _stream, _LONG)
        short = await _used_s(client, pid, _stream, _SHORT)
        unary = await _used_s(client, pid, _call, _LONG) - await _used_s(client, pid, _call, _SHORT)
    num_tokens = _NUM_REQUESTS * (_LONG - _SHORT)
    per_token = (streamed - short) / num_tokens
    per_request = short / _NUM_REQUESTS - _SHORT * per_token
    return 1000 * per_token, 1000 * unary / num_tokens, 1000 * per_request


async def _used_s(client: AsyncClient, pid: int, call: _Call, num_tokens: int) -> float:
    """The gateway's processor time for requests that are sent all at once."""
    rng = random.Random(num_tokens)
    ids = range(_FIRST_TOKEN_ID, _LAST_TOKEN_ID)
    prompts = [rng.choices(ids, k=_PROMPT_TOKENS) for _ in range(_NUM_REQUESTS)]
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    before_s = cpu_s(pid)
    await asyncio.gather(*(call(client, prompt, params) for prompt in prompts))
    return cpu_s(pid) - before_s


async def _stream(client: AsyncClient, prompt: list[int], params: SamplingParams) -> None:
    async for _ in client.stream_generate(prompt, params):
        pass


async def _call(client: AsyncClient, prompt: list[int], params: SamplingParams) -> None:
    await client.generate(prompt, params)
