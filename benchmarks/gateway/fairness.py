"""What a tenant's burst of requests costs another one."""

import asyncio
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.engines.models import SMALL
from benchmarks.gateway.stack import real_stack
from benchmarks.report import Cell, Column, Part, Target
from quire.client.async_client import AsyncClient
from quire.client.sampling_params import SamplingParams
from quire.launcher.stack import LocalStack
from quire.service.api_keys import hash_key, new_key

_BURST = 500
_BURST_PROMPT, _BURST_OUTPUT = 900, 100
_MAX_FIRST_TOKEN_S = 1.0
_MAX_DIFFERENCE = 0.05
# Requests that each of two tenants keeps in the service.
_BACKLOG = 100
_BACKLOG_PROMPT, _BACKLOG_OUTPUT = 200, 50
_FIRST_TOKEN_ID = 300


def fairness(seconds: float) -> Part:
    """Measure the burst with one tenant and with two, then two backlogged tenants."""
    keys = [new_key(), new_key()]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys.yaml"
        file.write_text(
            "".join(f"- {{name: t{i}, keys: [{hash_key(k).hex()}]}}\n" for i, k in enumerate(keys))
        )
        first_token_s = {}
        for label, guest in (("the same tenant", keys[0]), ("another tenant", keys[1])):
            with real_stack({"QUIRE_GATEWAY_API_KEYS": str(file)}) as stack:
                first_token_s[label] = asyncio.run(_behind_burst(stack, keys[0], guest))
        with real_stack({"QUIRE_GATEWAY_API_KEYS": str(file)}) as stack:
            tokens = asyncio.run(_shared(stack, keys, seconds))
    difference = abs(tokens[0] - tokens[1]) / max(tokens)
    other = first_token_s["another tenant"]
    rows: list[dict[str, Cell]] = []
    burst = f"first token behind {_BURST} requests of"
    rows += [{"what": f"{burst} {k}, s", "value": v} for k, v in first_token_s.items()]
    rows += [{"what": f"output tokens of tenant {i}", "value": n} for i, n in enumerate(tokens, 1)]
    return Part(
        name="fairness",
        title="Fairness between tenants",
        notes=[
            f"{SMALL.size}, float32 on CPU. A tenant sends {_BURST} requests of {_BURST_PROMPT} + "
            f"{_BURST_OUTPUT} tokens at once; a request of 100 tokens follows when the first of "
            f"them has a token. Then two tenants of equal weight keep {_BACKLOG} requests of "
            f"{_BACKLOG_PROMPT} + {_BACKLOG_OUTPUT} tokens each in the service; output tokens are "
            f"counted for {seconds:g} s.",
        ],
        columns=[Column("what", "measured"), Column("value", "value", ",.2f")],
        rows=rows,
        targets=[
            Target(
                f"{burst} another tenant",
                f"at most {_MAX_FIRST_TOKEN_S:g} s",
                f"{other:.2f} s",
                other <= _MAX_FIRST_TOKEN_S,
            ),
            Target(
                "difference of two backlogged tenants",
                f"at most {_MAX_DIFFERENCE:.0%}",
                f"{difference:.1%}",
                difference <= _MAX_DIFFERENCE,
            ),
        ],
    )


async def _behind_burst(stack: LocalStack, host: str, guest: str) -> float:
    """Seconds to the guest's first token behind the host's burst."""
    params = SamplingParams(max_tokens=_BURST_OUTPUT, ignore_eos=True)
    started = asyncio.Event()

    async def run(client: AsyncClient, number: int) -> None:
        prompt = _prompt(number, _BURST_PROMPT)
        async for delta in client.stream_generate(prompt, params):
            if delta.outputs:
                started.set()

    async with (
        AsyncClient(stack.address, api_key=host) as busy,
        AsyncClient(stack.address, api_key=guest) as client,
    ):
        burst = [asyncio.create_task(run(busy, number)) for number in range(_BURST)]
        await started.wait()
        began = time.perf_counter()
        stream = client.stream_generate(_prompt(_BURST, 100), SamplingParams(max_tokens=10))
        async for delta in stream:
            if delta.outputs:
                break
        first_token_s = time.perf_counter() - began
        await stream.aclose()
        for task in burst:
            task.cancel()
        await asyncio.gather(*burst, return_exceptions=True)
    return first_token_s


async def _shared(stack: LocalStack, keys: list[str], seconds: float) -> list[int]:
    """Output tokens that each tenant receives within the time, both having a backlog."""
    tokens = [0] * len(keys)
    params = SamplingParams(max_tokens=_BACKLOG_OUTPUT, ignore_eos=True)
    is_counting = False

    async def run(client: AsyncClient, tenant: int, number: int) -> None:
        prompt = _prompt(tenant * _BACKLOG + number, _BACKLOG_PROMPT)
        while True:
            async for delta in client.stream_generate(prompt, params):
                if is_counting:
                    tokens[tenant] += sum(len(output.token_ids) for output in delta.outputs)

    clients = [AsyncClient(stack.address, api_key=key) for key in keys]
    # The tenants' requests alternate, so that neither is ahead at the start.
    running = [
        asyncio.create_task(run(client, tenant, number))
        for number in range(_BACKLOG)
        for tenant, client in enumerate(clients)
    ]
    await asyncio.sleep(seconds / 6)
    is_counting = True
    await asyncio.sleep(seconds)
    is_counting = False
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for client in clients:
        with suppress(Exception):
            await client.close()
    return tokens


def _prompt(number: int, length: int) -> list[int]:
    """A prompt that shares no prefix with those of other numbers."""
    span = SMALL.vocab_size - _FIRST_TOKEN_ID
    return [_FIRST_TOKEN_ID + (number + 31 * i) % span for i in range(length)]
