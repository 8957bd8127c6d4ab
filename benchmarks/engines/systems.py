"""The systems that are compared, and how each is started."""

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engines.host import Host
from benchmarks.engines.models import RECIPE, BenchModel, Shape
from benchmarks.engines.workload import MAX_MODEL_LEN, MAX_NUM_SEQS, Work

ROOT = Path(__file__).parents[2]
_WARM_REQUESTS, _WARM_TOKENS = 8, 8
_VLLM_KV_CACHE_GIB = 2


@dataclass(frozen=True)
class System:
    """A system that runs the work."""

    name: str
    # In targets, and in rows of tables.
    short: str
    title: str
    module: str
    # Whether it runs in vLLM's environment.
    is_foreign: bool = False


QUIRE = System("quire", "Quire", "Quire, through its gateway over gRPC", "quire_stack")
RUNNER = System("runner", "its runner", "its runner alone, in process", "runner_alone")
GENERATE = System(
    "generate", "transformers", "transformers `generate`, static batch", "transformers_generate"
)
VLLM = System(
    "vllm", "vLLM", "vLLM's CPU build, `LLM.generate`, eager", "vllm_offline", is_foreign=True
)
PRODUCTS = System("products", "matrix products", "the matrix products alone", "matrix_products")
SYSTEMS = (QUIRE, RUNNER, GENERATE, VLLM, PRODUCTS)


@dataclass(frozen=True)
class Bench:
    """Paths of the benchmark."""

    # For models, jobs and logs.
    folder: Path
    # The Python of an environment with vLLM; None without one.
    vllm_python: str | None

    def has(self, system: System) -> bool:
        return not system.is_foreign or self.vllm_python is not None

    def model_folder(self, model: Shape) -> Path:
        """Return the folder of the model's files, which are made on the first call."""
        folder = self.folder / f"model-{model.name}-{RECIPE}"
        if not (folder / "tokenizer.json").exists():
            maker = [sys.executable, "-m", "benchmarks.engines.make_model"]
            subprocess.run([*maker, model.name, str(folder)], cwd=ROOT, check=True)
        return folder

    def start(self, system: System, model: BenchModel, work: Work) -> AbstractContextManager[Host]:
        """Start the system with the model and return when it is ready. EngineError if it fails."""
        python = self.vllm_python if system.is_foreign else sys.executable
        assert python is not None
        return Host(
            system.name,
            [python, "-m", f"benchmarks.engines.{system.module}"],
            {
                "name": model.name,
                "model": str(self.model_folder(model)),
                "kv_cache_bytes": model.kv_cache_bytes,
                "max_model_len": MAX_MODEL_LEN,
                "max_num_seqs": MAX_NUM_SEQS,
                "work": vars(work),
                "warmup": vars(_warmup(work)),
            },
            self.folder,
            vllm_environment() if system.is_foreign else {},
        )


def vllm_environment() -> Mapping[str, str]:
    """Return vLLM's environment variables: all cores, and no network access."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(_VLLM_KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": _cores(),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }


def _cores() -> str:
    """Return the cores that this process may use, as a range or a list."""
    cores = sorted(os.sched_getaffinity(0))
    if cores == list(range(cores[0], cores[-1] + 1)):
        return f"{cores[0]}-{cores[-1]}"
    return ",".join(map(str, cores))


def _warmup(work: Work) -> Work:
    """Return a few requests with reversed prompts, so that no prefix cache holds the work."""
    prompts = [prompt[::-1] for prompt in work.prompts[:_WARM_REQUESTS]]
    return Work(prompts, [_WARM_TOKENS] * len(prompts))
