"""Starts variants and returns when they are ready for the loads."""

import os
import sys
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.engines.host import EngineError, Host
from benchmarks.engines.models import Shape
from benchmarks.engines.systems import ROOT, vllm_environment
from benchmarks.engines.types.checkpoints import Checkpoints, weight_bytes
from benchmarks.engines.types.environments import Environments
from benchmarks.engines.types.llama_bench import BatchedBench
from benchmarks.engines.types.loads import Loads
from benchmarks.engines.types.quire_weights import pool_bytes, quire_weight_bytes
from benchmarks.engines.types.variants import (
    FLOAT32,
    INT4,
    INT8,
    LLAMA_SERVER,
    OPENVINO,
    QUIRE,
    VLLM,
    Variant,
)
from worker_svc.settings import WorkerSettings

_MODULES = {
    QUIRE: "quire_engine",
    VLLM: "vllm_engine",
    OPENVINO: "openvino_engine",
    LLAMA_SERVER: "llama_server",
}
_PACKAGE = "benchmarks.engines.types"
# llama.cpp's defaults: tokens of a batch, and of a part of it that is computed at once.
_BATCH, _UBATCH = 2048, 512
# Room for more tokens than a sequence has, in llama.cpp's server.
_SPARE_TOKENS = 64


class Runner(Protocol):
    """Runs a load, given by its name. EngineError if it fails."""

    def call(self, command: str) -> Any: ...


@dataclass(frozen=True)
class Started:
    """A variant that has loaded its weights."""

    runner: Runner
    # Read in every decoding step.
    weight_bytes: int
    # From the start of its process; None where each load starts one.
    ready_s: float | None
    # The same with packed weights in its cache; Quire's only.
    cached_ready_s: float | None = None


@dataclass(frozen=True)
class Setup:
    """What all variants share."""

    shape: Shape
    loads: Loads
    # For jobs and logs.
    folder: Path
    environments: Environments
    checkpoints: Checkpoints

    def start(self, variant: Variant, stack: ExitStack) -> Started:
        """Start a variant, which ends with `stack`. EngineError, with the reason, if it cannot be
        started."""
        match variant.engine:
            case "quire":
                return self._quire(variant, stack)
            case "vllm":
                self.environments.folder(VLLM)  # Before the conversion.
                model = self.checkpoints.compressed(variant.type)
                return self._foreign(variant, model, vllm_environment(), stack)
            case "openvino":
                return self._foreign(variant, self.checkpoints.openvino(variant.type), {}, stack)
            case "llama.cpp":
                return self._batched_bench(variant)
            case _:
                return self._llama_server(variant, stack)

    def bandwidth(self, stack: ExitStack) -> Runner:
        """Start the process that measures the bandwidth."""
        command = [sys.executable, "-m", f"{_PACKAGE}.bandwidth"]
        return stack.enter_context(Host("bandwidth", command, {}, self.folder, {}))

    def _quire(self, variant: Variant, stack: ExitStack) -> Started:
        settings = quire_settings(variant, self.shape, self.loads)
        job = {"model": str(self.checkpoints.model), "settings": settings}
        host = self._host(variant, sys.executable, job, {}, stack)
        num_bytes = quire_weight_bytes(self.shape, variant.type)
        return Started(host, num_bytes, host.call("ready_s"), host.call("cached_ready_s"))

    def _foreign(
        self, variant: Variant, model: Path, environment: Mapping[str, str], stack: ExitStack
    ) -> Started:
        job = {
            "model": str(model),
            "max_model_len": self.loads.max_model_len,
            "max_num_seqs": self.loads.max_num_seqs,
        }
        python = self.environments.python(variant.engine)
        host = self._host(variant, python, job, environment, stack)
        return Started(host, weight_bytes(model), host.start_s)

    def _batched_bench(self, variant: Variant) -> Started:
        command = self._llama_command("llama-batched-bench", variant)
        bench = BatchedBench(command, self.loads, self.folder / f"{variant.name}.log")
        return Started(bench, weight_bytes(self.checkpoints.gguf(variant.type)), None)

    def _llama_server(self, variant: Variant, stack: ExitStack) -> Started:
        num_seqs = self.loads.max_num_seqs
        context = num_seqs * (self.loads.num_tokens + _SPARE_TOKENS)
        command = [
            *self._llama_command("llama-server", variant),
            *("--parallel", str(num_seqs), "--ctx-size", str(context), "--no-webui"),
        ]
        job = {"command": command, "log": str(self.folder / f"{variant.name}-process.log")}
        host = self._host(variant, sys.executable, job, {}, stack)
        return Started(host, weight_bytes(self.checkpoints.gguf(variant.type)), host.start_s)

    def _llama_command(self, binary: str, variant: Variant) -> list[str]:
        threads = str(len(os.sched_getaffinity(0)))
        return [
            *(self.environments.llama_binary(binary), "--model"),
            str(self.checkpoints.gguf(variant.type)),
            *("--threads", threads, "--threads-batch", threads),
            *("--batch-size", str(_BATCH), "--ubatch-size", str(_UBATCH)),
        ]

    def _host(
        self,
        variant: Variant,
        python: str,
        job: Mapping[str, object],
        environment: Mapping[str, str],
        stack: ExitStack,
    ) -> Host:
        work = {
            "num_outputs": self.loads.num_output_tokens,
            "prompts": self.loads.prompts(self.shape.vocab_size),
        }
        return stack.enter_context(
            Host(
                variant.name,
                [python, "-m", f"{_PACKAGE}.{_MODULES[variant.engine]}"],
                {**work, **job},
                self.folder,
                {"PYTHONPATH": str(ROOT), **environment},
            )
        )


def quire_settings(
    variant: Variant,
    shape: Shape,
    loads: Loads,
    known: Collection[str] = WorkerSettings.model_fields,
) -> dict[str, str]:
    """Return the services' settings as variables. EngineError if the worker's, `known`, lack one
    for the variant."""
    dtype = "float32" if variant.type == FLOAT32 else "bfloat16"
    settings = {
        "QUIRE_SCHEDULER_ENABLE_PREFIX_CACHING": "false",
        "QUIRE_WORKER_DEVICE": "cpu",
        "QUIRE_WORKER_DTYPE": dtype,
        "QUIRE_WORKER_MAX_MODEL_LEN": str(loads.max_model_len),
        "QUIRE_WORKER_MAX_NUM_SEQS": str(loads.max_num_seqs),
        "QUIRE_WORKER_KV_CACHE_MEMORY": str(pool_bytes(shape, variant.type)),
    }
    if variant.type in (INT8, INT4):
        if "quantization" not in known:
            raise EngineError("the worker has no setting --quantization")
        settings["QUIRE_WORKER_QUANTIZATION"] = variant.type
    return settings
