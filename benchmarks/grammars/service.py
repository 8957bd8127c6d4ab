"""Guided requests against free ones of the same lengths, through all services and in vLLM."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engines.host import EngineError, Host
from benchmarks.engines.models import SMALL
from benchmarks.engines.systems import ROOT, Bench, vllm_environment
from benchmarks.engines.systems import VLLM as VLLM_SYSTEM
from benchmarks.engines.throughput import left_out_if_foreign
from benchmarks.engines.workload import MAX_MODEL_LEN, MAX_NUM_SEQS
from benchmarks.grammars.long_outputs import (
    FREE,
    NUM_REQUESTS,
    NUM_TOKENS,
    PROMPT_LENGTH,
    REGEX,
    SCHEMA,
    STOP_TOKEN_ID,
    Format,
    formats,
    prompts,
)
from benchmarks.report import Cell, Column, Part, Target
from quire.client.client import Client
from quire.client.operations import Operations
from quire.client.sampling_params import SamplingParams
from quire.client.structured_output import StructuredOutput
from quire.launcher.stack import LocalStack

QUIRE, VLLM = "Quire", "vLLM"
FOLDER = ROOT / ".cache/engines"
_MAX_LOSS = 0.05
_TIMEOUT_S = 10.0
# Free requests without any stop token; no request of a model with an end of sequence is like that.
ENDLESS = "endless"
_TITLES = {
    FREE: "free",
    ENDLESS: "free, without stop tokens",
    REGEX: "guided by a regex",
    SCHEMA: "guided by a schema",
}


@dataclass(frozen=True)
class _System:
    name: str
    works: Sequence[str]
    run: Callable[[str], float]  # returns the seconds of one run of the work


def stack(**settings: str) -> LocalStack:
    """A private stack with the model; not started."""
    return LocalStack(
        str(Bench(FOLDER, None).model_folder(SMALL)),
        settings={
            "QUIRE_WORKER_DTYPE": "float32",
            "QUIRE_WORKER_DEVICE": "cpu",
            "QUIRE_WORKER_MAX_MODEL_LEN": str(MAX_MODEL_LEN),
            "QUIRE_WORKER_MAX_NUM_SEQS": str(MAX_NUM_SEQS),
            "QUIRE_WORKER_KV_CACHE_MEMORY": str(SMALL.kv_cache_bytes),
            **settings,
        },
    )


def vllm_python(environment: Path | None) -> str | None:
    return None if environment is None else str(environment.absolute() / "bin/python")


def service(environment: Path | None, num_rounds: int) -> Part:
    """Without vLLM if there is no environment with it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    given = prompts(NUM_REQUESTS, seed=0)
    works = formats(NUM_REQUESTS)
    with ExitStack() as opened:
        quire = _Quire(opened, given, works)
        systems = [_System(QUIRE, [ENDLESS, *works], quire.run)]
        version = None
        if (python := vllm_python(environment)) is not None:
            with left_out_if_foreign(VLLM_SYSTEM):
                host = opened.enter_context(_vllm(python, given, works))
                version = host.call("version")
                systems.append(_System(VLLM, list(works), lambda name: _seconds(host.call(name))))
        for system in systems:
            for name in system.works:
                system.run(name)
        rounds = [_round(systems, number) for number in range(num_rounds)]
        jumped = quire.share_of_jumps()
    return _part(rounds, version, jumped)


class _Quire:
    def __init__(
        self, opened: ExitStack, given: list[list[int]], works: Mapping[str, Sequence[Format]]
    ) -> None:
        local = opened.enter_context(stack())
        self._client = opened.enter_context(Client(local.address))
        self._operations = opened.enter_context(Operations(local.scheduler_address))
        self._prompts = given
        self._params = {ENDLESS: [_params(seed, []) for seed in range(len(given))]}
        self._num_runs = 0
        # Outputs depend on the seeds alone, so this token ends none of them.
        unused = _unused_token_id(self._outputs(ENDLESS))
        for name, each in works.items():
            stop_token_id = unused if name == FREE else STOP_TOKEN_ID
            self._params[name] = [
                _params(seed, [stop_token_id], one) for seed, one in enumerate(each)
            ]

    def run(self, name: str) -> float:
        self._operations.reset_prefix_cache(_TIMEOUT_S)
        self._num_runs += name == SCHEMA
        began_s = time.perf_counter()
        outputs = self._outputs(name)
        seconds = time.perf_counter() - began_s
        _check(QUIRE, list(map(len, outputs)))
        return seconds

    def _outputs(self, name: str) -> list[list[int]]:
        written = self._client.generate_all(list(self._prompts), self._params[name])
        return [list(request.outputs[0].token_ids) for request in written]

    def share_of_jumps(self) -> float:
        """Of the tokens of the runs with schemas."""
        status = self._operations.status(with_block_maps=False, timeout_s=_TIMEOUT_S)
        num_tokens = self._num_runs * len(self._prompts) * NUM_TOKENS
        return sum(worker.num_forced_tokens for worker in status.workers) / num_tokens


def _unused_token_id(outputs: Iterable[Iterable[int]]) -> int:
    used = set(chain.from_iterable(outputs))
    return next(token_id for token_id in count() if token_id not in used)


def _params(seed: int, stop_token_ids: list[int], one: Format = None) -> SamplingParams:
    return SamplingParams(
        temperature=1.0,
        seed=seed,
        max_tokens=NUM_TOKENS,
        ignore_eos=one is None,
        stop_token_ids=stop_token_ids,
        structured_output=None if one is None else StructuredOutput(**one),
    )


def _vllm(python: str, given: Sequence[list[int]], works: Mapping[str, Sequence[Format]]) -> Host:
    return Host(
        "vllm-formats",
        [python, "-m", "benchmarks.grammars.vllm_formats"],
        {
            "model": str(Bench(FOLDER, python).model_folder(SMALL)),
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": MAX_NUM_SEQS,
            "prompts": given,
            "formats": works,
            "num_tokens": NUM_TOKENS,
            "stop_token_id": STOP_TOKEN_ID,
        },
        FOLDER,
        vllm_environment(),
    )


def _seconds(result: Mapping[str, Any]) -> float:
    _check(VLLM, result["num_outputs"])
    return float(result["seconds"])


def _check(system: str, num_outputs: Sequence[int]) -> None:
    if wrong := [count for count in num_outputs if count != NUM_TOKENS]:
        raise EngineError(f"{system}: outputs of {wrong} tokens instead of {NUM_TOKENS}")


def _round(systems: Iterable[_System], number: int) -> dict[tuple[str, str], float]:
    """Seconds by system and work. The order alternates between rounds, so that a machine that
    becomes slower or faster favours nothing."""
    return {
        (system.name, work): system.run(work)
        for system in systems
        for work in system.works[:: -1 if number % 2 else 1]
    }


def _part(
    rounds: Sequence[Mapping[tuple[str, str], float]], version: str | None, jumped: float
) -> Part:
    rows = [_row(rounds, system, name) for system, name in sorted(rounds[0])]
    loss = 1 - _ratio(rounds, QUIRE, REGEX)
    beside = "" if version is None else f", vLLM {version} (`LLM.generate`, eager, its defaults)"
    return Part(
        name="service",
        title="Guided requests through all services, 30 million parameters",
        notes=[
            f"{NUM_REQUESTS} requests at once through the gateway{beside}: prompts of "
            f"{PROMPT_LENGTH} tokens, outputs of {NUM_TOKENS}, at temperature 1; {len(rounds)} "
            "rounds. Ratios are medians of the rounds'. Quire's requests have a stop token, which "
            "no free one samples: as those of any model with an end of sequence, they may end "
            "before their last token, so a plan has fewer rounds. Every guided request follows "
            "another format, compiled before. The regex forces no token; the schema's names and "
            f"punctuation are forced, and {jumped:.0%} of its tokens in Quire were jumps.",
        ],
        columns=[
            Column("system", "system"),
            Column("work", "requests"),
            Column("speed", "tokens/s, median", ",.0f"),
            Column("fastest", "fastest", ",.0f"),
            Column("slowest", "slowest", ",.0f"),
            Column("ratio", "of free ones", ".3f"),
        ],
        rows=rows,
        targets=[
            Target(
                "loss of guided requests through the gateway",
                f"at most {_MAX_LOSS:.0%}",
                f"{loss:.1%}",
                loss <= _MAX_LOSS,
            )
        ],
    )


def _row(
    rounds: Sequence[Mapping[tuple[str, str], float]], system: str, name: str
) -> Mapping[str, Cell]:
    speeds = [NUM_REQUESTS * NUM_TOKENS / one[system, name] for one in rounds]
    return {
        "system": system,
        "work": _TITLES[name],
        "speed": median(speeds),
        "fastest": max(speeds),
        "slowest": min(speeds),
        "ratio": None if name == FREE else _ratio(rounds, system, name),
    }


def _ratio(rounds: Sequence[Mapping[tuple[str, str], float]], system: str, name: str) -> float:
    return median(one[system, FREE] / one[system, name] for one in rounds)
