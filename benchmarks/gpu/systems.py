"""Starts the runner alone and the whole stack in child processes, with the same work."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.engines.host import Host
from benchmarks.engines.workload import Work
from benchmarks.gpu.workload import MAX_MODEL_LEN, workload

ROOT = Path(__file__).parents[2]
MAX_NUM_SEQS = 256
_MAX_NUM_BATCHED_TOKENS = 16_384
# Room for all sequences of the work at once.
_KV_CACHE_GIB = 36
_DECODE_ROWS = (1, 16, 64, 256)
# Version of the way the weights are drawn. Increment it on a change, so that models are remade.
_RECIPE = "1"


def model_folder(folder: Path) -> Path:
    """Return the folder of the model's files, which are made on the first call."""
    model = folder / f"model-{_RECIPE}"
    if not (model / "tokenizer.json").exists():
        maker = [sys.executable, "-m", "benchmarks.gpu.make_model", str(model)]
        subprocess.run(maker, cwd=ROOT, check=True)
    return model


def worker_settings(model: Path, block_size: int, **changes: object) -> dict[str, str]:
    """Return the environment variables of a worker."""
    settings: dict[str, object] = {
        "model": model,
        "dtype": "bfloat16",
        "device": "cuda",
        "block_size": block_size,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": _MAX_NUM_BATCHED_TOKENS,
        "kv_cache_memory": f"{_KV_CACHE_GIB}GiB",
        **changes,
    }
    return {f"QUIRE_WORKER_{key.upper()}": str(value) for key, value in settings.items()}


def start_runner(folder: Path, block_size: int, **changes: object) -> Host:
    settings = worker_settings(model_folder(folder), block_size, **changes)
    return _start("runner_alone", folder, {"decode_rows": _DECODE_ROWS}, settings)


def start_stack(folder: Path, block_size: int) -> Host:
    model = model_folder(folder)
    settings = {
        **worker_settings(model, block_size),
        "QUIRE_SCHEDULER_MAX_NUM_BATCHED_TOKENS": str(_MAX_NUM_BATCHED_TOKENS),
    }
    # The launcher sets it.
    del settings["QUIRE_WORKER_MODEL"]
    return _start("stack", folder, {"model": str(model), "settings": settings}, {})


def _start(
    module: str, folder: Path, job: Mapping[str, Any], environment: Mapping[str, str]
) -> Host:
    work = workload()
    # Reversed prompts, so that no prefix cache holds the work.
    prompts = [prompt[::-1] for prompt in work.prompts[:32]]
    warmup = Work(prompts, [32] * len(prompts), work.temperature)
    return Host(
        f"gpu-{module}",
        [sys.executable, "-m", f"benchmarks.gpu.{module}"],
        {**job, "work": vars(work), "warmup": vars(warmup)},
        folder,
        environment,
    )
