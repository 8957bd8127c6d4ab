"""The runner alone and the whole stack, each in processes of its own, on the same work."""

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
# For all of the work's keys and values at once.
_KV_CACHE_GIB = 36
_DECODE_ROWS = (1, 16, 64, 256)
# Of the model's weights: another recipe is another model.
_RECIPE = "1"


def model_folder(folder: Path) -> Path:
    """The model's files, made the first time."""
    model = folder / f"model-{_RECIPE}"
    if not (model / "tokenizer.json").exists():
        maker = [sys.executable, "-m", "benchmarks.gpu.make_model", str(model)]
        subprocess.run(maker, cwd=ROOT, check=True)
    return model


def worker_settings(model: Path, block_size: int, **changes: object) -> dict[str, str]:
    """Environment variables of a worker."""
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
    # Who starts the worker tells it the model.
    del settings["QUIRE_WORKER_MODEL"]
    return _start("stack", folder, {"model": str(model), "settings": settings}, {})


def _start(
    module: str, folder: Path, job: Mapping[str, Any], environment: Mapping[str, str]
) -> Host:
    work = workload()
    # Other tokens: no prefix cache shall know the work itself.
    prompts = [prompt[::-1] for prompt in work.prompts[:32]]
    warmup = Work(prompts, [32] * len(prompts), work.temperature)
    return Host(
        f"gpu-{module}",
        [sys.executable, "-m", f"benchmarks.gpu.{module}"],
        {**job, "work": vars(work), "warmup": vars(warmup)},
        folder,
        environment,
    )
