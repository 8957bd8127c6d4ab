"""llama.cpp's own benchmark, `llama-batched-bench`, which ends after each load."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.engines.host import EngineError, log_end
from benchmarks.engines.types.loads import STREAM, WARM, Loads


@dataclass(frozen=True)
class BatchedBench:
    """Runs the loads as commands. Its prompts are its own random tokens, and it samples none."""

    # Without the numbers of requests and tokens.
    command: Sequence[str]
    loads: Loads
    log: Path

    def call(self, load: str) -> dict[str, float]:
        """Run a load. EngineError if the program fails."""
        if load == WARM:
            return {}  # The program begins with a warm-up of its own.
        loads = self.loads
        at_once = [1] * loads.num_streams if load == STREAM else [int(load)] * self._times(load)
        arguments = [
            *("-npp", str(loads.num_prompt_tokens), "-ntg", str(loads.num_output_tokens)),
            *("-npl", ",".join(map(str, at_once)), "-c", str(max(at_once) * loads.num_tokens)),
            *("--output-format", "jsonl"),
        ]
        with self.log.open("w") as log:
            ran = subprocess.run(
                [*self.command, *arguments], stdout=subprocess.PIPE, stderr=log, text=True
            )
        found = list(measurements(ran.stdout))
        if ran.returncode or [one.num_requests for one in found] != at_once:
            raise EngineError(f"exit status {ran.returncode}; {log_end(self.log)}")
        return of_stream(found) if load == STREAM else of_requests(found)

    def _times(self, load: str) -> int:
        return self.loads.at_once[int(load)]


@dataclass(frozen=True)
class Measurement:
    """One line of the benchmark's output."""

    num_requests: int
    num_tokens: int  # prompts and outputs
    seconds: float
    prompt_s: float
    # Of all requests together.
    outputs_per_s: float


def measurements(text: str) -> Iterator[Measurement]:
    """Parse the output, whose lines in JSON are mixed with others."""
    for line in text.splitlines():
        if line.startswith("{"):
            found = json.loads(line)
            yield Measurement(
                found["pl"], found["n_kv"], found["t"], found["t_pp"], found["speed_tg"]
            )


def of_requests(found: Sequence[Measurement]) -> dict[str, float]:
    """Join repetitions as `serving.run_at_once` does."""
    seconds = sum(one.seconds for one in found)
    return {"seconds": seconds, "tokens_per_s": sum(one.num_tokens for one in found) / seconds}


def of_stream(found: Sequence[Measurement]) -> dict[str, float]:
    """Join streams as `serving.run_streams` does."""
    return {
        "first_s": median(one.prompt_s for one in found),
        "tokens_per_s": median(one.outputs_per_s for one in found),
    }
