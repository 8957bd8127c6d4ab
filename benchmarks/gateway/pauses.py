"""What a long prompt costs streams that run beside it, and what limiting its steps costs."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import mean, median

from benchmarks.engines.models import TYPED
from benchmarks.gateway.stack import model_folder
from benchmarks.report import Cell, Column, Part, Target
from quire.client.async_client import AsyncClient
from quire.client.sampling_params import SamplingParams
from quire.launcher.stack import LocalStack

_LIMITS_S = ("0", "0.25")
_MOST_GAP_S = 0.5
_LEAST_OF_RATE = 0.95
_LONG_PROMPT = 1800
_NUM_STREAMS, _STREAM_PROMPT, _STREAM_OUTPUT = 2, 100, 200
# The streams decode for so long before the long prompt is sent.
_BEFORE_S = 1.5
_NUM_REQUESTS, _PROMPT, _OUTPUT = 32, 160, 32
_SETTINGS = {
    "QUIRE_WORKER_DEVICE": "cpu",
    "QUIRE_WORKER_MAX_MODEL_LEN": "4096",
    "QUIRE_WORKER_MAX_NUM_SEQS": str(_NUM_REQUESTS),
    "QUIRE_WORKER_KV_CACHE_MEMORY": str(TYPED.kv_cache_bytes),
    # Repeated work must not become cheaper.
    "QUIRE_SCHEDULER_ENABLE_PREFIX_CACHING": "false",
}


@dataclass(frozen=True)
class _Round:
    first_token_s: float  # of the long prompt
    gap_s: float  # the longest between two messages of the streams
    tokens_per_s: float  # of many requests at once, prompts and outputs
    many_first_token_s: float
    many_gap_s: float


def pauses(num_rounds: int) -> Part:
    """Measure stacks without and with a limit, alternately."""
    rounds: dict[str, list[_Round]] = {limit: [] for limit in _LIMITS_S}
    with ExitStack() as running:
        stacks = {limit: running.enter_context(_stack(limit)) for limit in _LIMITS_S}
        for stack in stacks.values():
            asyncio.run(_measure(stack))
        for number in range(num_rounds):
            for limit in _LIMITS_S[:: -1 if number % 2 else 1]:
                rounds[limit].append(asyncio.run(_measure(stacks[limit])))
    ratios = [
        limited.tokens_per_s / unlimited.tokens_per_s
        for unlimited, limited in zip(*rounds.values(), strict=True)
    ]
    gap_s = median(one.gap_s for one in rounds[_LIMITS_S[-1]])
    return Part(
        name="pauses",
        title="Streams beside a long prompt",
        notes=[
            f"{TYPED.size}, {TYPED.dtype} on CPU, medians of {num_rounds} rounds. "
            f"{_NUM_STREAMS} streams run when a prompt of {_LONG_PROMPT} tokens arrives. Then "
            f"{_NUM_REQUESTS} streams of {_PROMPT} + {_OUTPUT} tokens are sent at once; tokens per "
            "second are those of prompts and outputs. *Pause*: the longest time between two "
            "messages of a stream. `--max-prefill-s` 0 is no limit."
        ],
        columns=[
            Column("max_prefill_s", "--max-prefill-s"),
            Column("gap_s", "pause, s", ".2f"),
            Column("first_token_s", "long prompt, first token s", ".2f"),
            Column("many_gap_s", f"{_NUM_REQUESTS} streams: pause, s", ".2f"),
            Column("many_first_token_s", "first token s, mean", ".2f"),
            Column("tokens_per_s", "tokens/s", ",.0f"),
        ],
        rows=[_row(limit, found) for limit, found in rounds.items()],
        targets=[
            Target(
                f"pause with {_LIMITS_S[-1]} s",
                f"at most {_MOST_GAP_S:g} s",
                f"{gap_s:.2f} s",
                gap_s <= _MOST_GAP_S,
            ),
            Target(
                f"tokens per second with {_LIMITS_S[-1]} s over those without a limit",
                f"at least {_LEAST_OF_RATE:g}",
                f"{median(ratios):.3f}",
                median(ratios) >= _LEAST_OF_RATE,
            ),
        ],
    )


def _row(limit: str, rounds: Sequence[_Round]) -> Mapping[str, Cell]:
    names = asdict(rounds[0])
    return {
        "max_prefill_s": limit,
        **{name: median(asdict(one)[name] for one in rounds) for name in names},
    }


def _stack(limit: str) -> LocalStack:
    settings = {**_SETTINGS, "QUIRE_SCHEDULER_MAX_PREFILL_S": limit}
    return LocalStack(str(model_folder(TYPED)), settings=settings)


async def _measure(stack: LocalStack) -> _Round:
    async with AsyncClient(stack.address) as client:
        streams = [
            asyncio.create_task(_stream(client, number, _STREAM_PROMPT, _STREAM_OUTPUT))
            for number in range(_NUM_STREAMS)
        ]
        await asyncio.sleep(_BEFORE_S)
        long = await _stream(client, _NUM_STREAMS, _LONG_PROMPT, 4)
        gaps = [max(times[1:]) for times in await asyncio.gather(*streams)]
        began = time.perf_counter()
        many = await asyncio.gather(
            *(_stream(client, 100 + number, _PROMPT, _OUTPUT) for number in range(_NUM_REQUESTS))
        )
        seconds = time.perf_counter() - began
    return _Round(
        first_token_s=long[0],
        gap_s=max(gaps),
        tokens_per_s=_NUM_REQUESTS * (_PROMPT + _OUTPUT) / seconds,
        many_first_token_s=mean(times[0] for times in many),
        many_gap_s=max(max(times[1:]) for times in many),
    )


async def _stream(
    client: AsyncClient, number: int, num_prompt_tokens: int, num_output_tokens: int
) -> list[float]:
    """Seconds to the first message with tokens, then from each to the next."""
    params = SamplingParams(max_tokens=num_output_tokens, temperature=0, ignore_eos=True)
    prompt = [(7919 * number + 31 * place) % TYPED.vocab_size for place in range(num_prompt_tokens)]
    times, last = [], time.perf_counter()
    async for delta in client.stream_generate(prompt, params):
        if delta.outputs:
            now = time.perf_counter()
            times.append(now - last)
            last = now
    return times
