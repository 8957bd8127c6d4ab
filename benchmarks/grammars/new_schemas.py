"""What a new schema costs the streams of others: inter-token gaps around its arrival."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import httpx2
import numpy as np
from tokenizers import Tokenizer

from benchmarks.engines.host import EngineError
from benchmarks.engines.http_servers import vllm_server
from benchmarks.engines.models import SMALL
from benchmarks.engines.systems import VLLM as VLLM_SYSTEM
from benchmarks.engines.systems import Bench
from benchmarks.engines.throughput import left_out_if_foreign
from benchmarks.engines.workload import MAX_MODEL_LEN
from benchmarks.grammars.guidance import new_schema
from benchmarks.grammars.long_outputs import PROMPT_LENGTH, STOP_TOKEN_ID, prompts
from benchmarks.grammars.service import FOLDER, QUIRE, VLLM, stack, vllm_python
from benchmarks.report import Cell, Column, Part, Target
from gateway_svc.structured.json_schemas import to_definition
from quire.bench.openai_server import OpenAIServer
from quire.bench.quire_server import QuireServer
from quire.bench.server import Server
from quire.bench.workload import BenchRequest
from quire.client.async_client import AsyncClient
from quire.client.sampling_params import SamplingParams
from quire.client.structured_output import StructuredOutput
from quire.service.grammars import GrammarVocabulary

_NUM_STREAMS = 16
_NUM_SESSIONS = 5
_ARRIVALS_PER_SESSION = 4
_NUM_SCHEMAS = _NUM_SESSIONS * _ARRIVALS_PER_SESSION
_FEWEST, _MOST = 50, 100
_INTERVAL_S = 0.5
_WINDOW_S = 0.4
_NUM_TOKENS = 16
_STREAM_TOKENS = MAX_MODEL_LEN - PROMPT_LENGTH
_MAX_DELAY_MS = 10.0
_MS_PER_S = 1000

Schema = Mapping[str, Any]
# Sends a request, with a schema or free, and returns at its end.
Arrive = Callable[[list[int], Schema | None], Awaitable[None]]


@dataclass(frozen=True)
class _Peer:
    """A server, and how a request arrives at it."""

    server: Server
    arrive: Arrive


@dataclass(frozen=True)
class Windows:
    """What the streams show in windows of time that begin with an arrival."""

    # The longest gap between two messages of a stream, by window and stream.
    longest_s: list[float] = field(default_factory=list)
    # Tokens of all streams, by window.
    num_tokens: list[int] = field(default_factory=list)

    def add(self, began_s: float, streams: Sequence[Sequence[float]]) -> None:
        """`streams` has the times of each stream's tokens."""
        ended_s = began_s + _WINDOW_S
        for times in streams:
            gaps = [b - a for a, b in pairwise(times) if b > began_s and a < ended_s]
            self.longest_s.append(max(gaps))
        self.num_tokens.append(sum(began_s < at <= ended_s for times in streams for at in times))

    def percentile_ms(self, percent: float) -> float:
        return _MS_PER_S * float(np.percentile(self.longest_s, percent))

    def noise_ms(self, percent: float) -> float:
        """The difference between every other window and the rest."""
        by_window = np.reshape(self.longest_s, (len(self.num_tokens), -1))
        halves = [np.percentile(half, percent) for half in (by_window[::2], by_window[1::2])]
        return _MS_PER_S * abs(float(halves[0] - halves[1]))


@dataclass(frozen=True)
class Comparison:
    """Windows of requests with new schemas, and of free ones that alternate with them."""

    guided: Windows = field(default_factory=Windows)
    free: Windows = field(default_factory=Windows)

    def added_ms(self, percent: float) -> float:
        return self.guided.percentile_ms(percent) - self.free.percentile_ms(percent)

    def late_ms(self) -> float:
        """How much later tokens come at the end of a window, on average."""
        share = fmean(self.guided.num_tokens) / fmean(self.free.num_tokens)
        return _MS_PER_S * _WINDOW_S * (1 - share)


def new_schemas(environment: Path | None, num_rounds: int) -> Part:
    """Without vLLM's server if there is no environment with it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with ExitStack() as opened:
        addresses = {QUIRE: opened.enter_context(stack()).address}
        if (python := vllm_python(environment)) is not None:
            with left_out_if_foreign(VLLM_SYSTEM):
                model = Bench(FOLDER, python).model_folder(SMALL)
                addresses[VLLM] = opened.enter_context(vllm_server(python, model, FOLDER))
        found = {name: Comparison() for name in addresses}
        # The first session of each server is not counted.
        for session in range(num_rounds * _NUM_SESSIONS + 1):
            for name, address in addresses.items():
                result = Comparison() if not session else found[name]
                asyncio.run(_session(name, address, session, result))
    return _part(found, num_rounds, _compile_ms())


def _compile_ms() -> list[float]:
    """The processor time of compiling each schema once, in this process."""
    folder = Bench(FOLDER, None).model_folder(SMALL)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = GrammarVocabulary.from_tokenizer(tokenizer, SMALL.vocab_size)
    taken_ms = []
    for session in range(_NUM_SESSIONS):
        for schema in _schemas(session):
            before_s = time.thread_time()
            vocabulary.compile(to_definition(schema))
            taken_ms.append(_MS_PER_S * (time.thread_time() - before_s))
    return taken_ms


def _schemas(session: int) -> Iterator[Schema]:
    """Schemas that no other session has."""
    for number in range(session * _ARRIVALS_PER_SESSION, (session + 1) * _ARRIVALS_PER_SESSION):
        share = number % _NUM_SCHEMAS / (_NUM_SCHEMAS - 1)
        yield new_schema(round(_FEWEST + (_MOST - _FEWEST) * share), number)


async def _session(name: str, address: str, session: int, result: Comparison) -> None:
    """Start streams, let requests arrive beside them, and stop the streams."""
    async with _quire(address) if name == QUIRE else _vllm(address) as peer:
        times: list[list[float]] = [[] for _ in range(_NUM_STREAMS)]
        streams = [
            asyncio.create_task(_listen(peer.server, prompt, of_stream))
            for prompt, of_stream in zip(
                prompts(_NUM_STREAMS, seed=3 * session + 1), times, strict=True
            )
        ]
        try:
            begun = await _arrivals(peer.arrive, session)
            if any(stream.done() for stream in streams):
                raise EngineError(f"{name}: a stream has ended before the last arrival")
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
    for began_s, is_guided in begun:
        (result.guided if is_guided else result.free).add(began_s, times)


async def _listen(server: Server, prompt: list[int], times: list[float]) -> None:
    """Append the time of each token."""
    async with aclosing(server.stream(BenchRequest(prompt, _STREAM_TOKENS))) as stream:
        async for message in stream:
            times += [time.perf_counter()] * message.count


async def _arrivals(arrive: Arrive, session: int) -> list[tuple[float, bool]]:
    """Send requests with schemas and free ones alternately. Returns when each was sent, and whether
    it had a schema."""
    begun = []
    prompts_to_send = prompts(2 * _ARRIVALS_PER_SESSION + 1, seed=3 * session + 2)
    # Arrives behind the streams: when its last token has come, all of them have begun.
    await arrive(prompts_to_send.pop(), None)
    for number, schema in enumerate(_schemas(session)):
        for one in (schema, None)[:: -1 if number % 2 else 1]:
            begun.append((time.perf_counter(), one is not None))
            request = asyncio.ensure_future(arrive(prompts_to_send.pop(), one))
            await asyncio.sleep(_INTERVAL_S)
            await request
    return begun


@asynccontextmanager
async def _quire(address: str) -> AsyncIterator[_Peer]:
    server = QuireServer(address, None, 1.0, True)
    client = AsyncClient(address)

    async def arrive(prompt: list[int], schema: Schema | None) -> None:
        params = SamplingParams(
            max_tokens=_NUM_TOKENS,
            ignore_eos=schema is None,
            stop_token_ids=None if schema is None else [STOP_TOKEN_ID],
            structured_output=None if schema is None else StructuredOutput(json=schema),
        )
        await client.generate(prompt, params)

    try:
        yield _Peer(server, arrive)
    finally:
        await client.close()
        await server.close()


@asynccontextmanager
async def _vllm(url: str) -> AsyncIterator[_Peer]:
    server = OpenAIServer(url, "bench", 1.0, True, None)
    async with httpx2.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:

        async def arrive(prompt: list[int], schema: Schema | None) -> None:
            body: dict[str, Any] = {
                "model": "bench",
                "prompt": prompt,
                "max_tokens": _NUM_TOKENS,
            }
            if schema is None:
                body["ignore_eos"] = True
            else:
                body["structured_outputs"] = {"json": schema}
                body["stop_token_ids"] = [STOP_TOKEN_ID]
            response = await client.post("/v1/completions", json=body)
            response.raise_for_status()

        try:
            yield _Peer(server, arrive)
        finally:
            await server.close()


def _part(found: Mapping[str, Comparison], num_rounds: int, compile_ms: Sequence[float]) -> Part:
    return Part(
        name="new-schemas",
        title="New schemas beside other streams, 30 million parameters",
        notes=[
            f"{_NUM_STREAMS} free streams. Beside them, every {_INTERVAL_S:g} s, arrives a request "
            f"of {PROMPT_LENGTH} tokens: alternately one with a JSON schema of {_FEWEST} to "
            f"{_MOST} properties that the server has not seen, and a free one. "
            f"{num_rounds * _NUM_SCHEMAS} of each, {_NUM_TOKENS} tokens of output at most.",
            "*Gap*: the longest time between two messages of a stream that touches the "
            f"{_WINDOW_S * _MS_PER_S:.0f} ms after an arrival, over all arrivals and streams, in "
            "milliseconds; *added* is the difference to free arrivals. *Late*: how much later the "
            "streams' tokens come at the end of these windows than after free arrivals, on "
            "average: gaps, and the processor time that compiling and masks take. Compiling one of "
            f"the schemas takes {median(compile_ms):.1f} ms of processor time, at most "
            f"{max(compile_ms):.1f}, in the gateway and again in the worker.",
        ],
        columns=[
            Column("system", "system"),
            Column("arrival", "arrivals"),
            Column("p50", "gap p50", ".1f"),
            Column("p99", "p99", ".1f"),
            Column("max", "max", ".1f"),
            Column("added_p50", "added p50", ".1f"),
            Column("added_p99", "p99", ".1f"),
            Column("added_max", "max", ".1f"),
            Column("late", "late", ".1f"),
        ],
        rows=[row for name, one in found.items() for row in _rows(name, one)],
        targets=[_target(found[QUIRE], percent) for percent in (50, 99)],
    )


def _target(one: Comparison, percent: int) -> Target:
    """Missed where the noise exceeds the aim."""
    added_ms, noise_ms = one.added_ms(percent), one.free.noise_ms(percent)
    return Target(
        f"gap added by a new schema, p{percent}",
        f"at most {_MAX_DELAY_MS:.0f} ms",
        f"{added_ms:.1f} ms (noise {noise_ms:.1f})",
        max(added_ms, noise_ms) <= _MAX_DELAY_MS,
    )


def _rows(name: str, one: Comparison) -> Iterator[dict[str, Cell]]:
    percents = {"p50": 50, "p99": 99, "max": 100}
    for arrival, windows in (("free", one.free), ("new schemas", one.guided)):
        row: dict[str, Cell] = {"system": name, "arrival": arrival}
        row |= {key: windows.percentile_ms(percent) for key, percent in percents.items()}
        if windows is one.guided:
            row |= {f"added_{key}": one.added_ms(percent) for key, percent in percents.items()}
            row["late"] = one.late_ms()
        yield row
