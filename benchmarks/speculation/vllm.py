"""vLLM's ngram speculation on the same requests."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.engines.host import EngineError, Host
from benchmarks.engines.systems import vllm_environment
from benchmarks.engines.workload import MAX_MODEL_LEN, MAX_NUM_SEQS
from benchmarks.report import Cell
from benchmarks.speculation.stacks import Work
from kernels.prompt_lookup import LONGEST, SHORTEST

_TITLE = "vLLM's ngram"


@dataclass(frozen=True)
class Vllm:
    """Where it is, and where jobs and logs are written."""

    python: str
    folder: Path

    def row(self, model: Path, work: Work, num_drafts: int, num_rounds: int) -> dict[str, Cell]:
        """A row of the table: the medians of the rounds of two processes, one after the other. A
        row without figures if vLLM refuses."""
        row: dict[str, Cell] = {"text": f"{work.title}, {_TITLE}", "requests": work.num_requests}
        config = {
            "method": "ngram",
            "num_speculative_tokens": num_drafts,
            "prompt_lookup_min": SHORTEST,
            "prompt_lookup_max": LONGEST,
        }
        try:
            without, speculating = (
                self._median_s(model, work, each, num_rounds) for each in (None, config)
            )
        except EngineError as error:
            print(f"{_TITLE}: {error}", flush=True)
            return {**row, "text": f"{work.title}, {_TITLE} (refused)"}
        total = work.num_output_tokens
        return {
            **row,
            "without": total / without,
            "with": total / speculating,
            "speedup": without / speculating,
        }

    def _median_s(
        self, model: Path, work: Work, config: dict[str, object] | None, num_rounds: int
    ) -> float:
        [prompts] = work.waves
        job = {
            "model": str(model),
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": MAX_NUM_SEQS,
            "speculative_config": config,
            "prompts": prompts,
            "num_tokens": work.num_tokens,
        }
        command = [self.python, "-m", "benchmarks.speculation.vllm_ngram"]
        name = "vllm-ngram" if config else "vllm-plain"
        with Host(name, command, job, self.folder, vllm_environment()) as host:
            host.call("run")
            return median(float(host.call("run")["seconds"]) for _ in range(num_rounds))
