"""The model in the format of each engine, converted once and kept beside the model."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engines.host import EngineError, log_end
from benchmarks.engines.types.environments import Environments
from benchmarks.engines.types.variants import BFLOAT16, GGUF, LLAMA, OPENVINO

_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin")
_OFFLINE = {"HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Checkpoints:
    """Converts the model on first use. EngineError if a conversion fails."""

    # In Hugging Face format.
    model: Path
    environments: Environments

    def compressed(self, kind: str) -> Path:
        """Return a folder in the format compressed-tensors, for vLLM."""
        if kind == BFLOAT16:
            return self.model
        path = self._beside(f"compressed-{kind}")
        maker = [sys.executable, "-m", "benchmarks.engines.types.make_compressed"]
        return _made(path, [*maker, str(self.model), kind])

    def gguf(self, kind: str) -> Path:
        """Return a file for llama.cpp."""
        wide = self._beside("BF16.gguf")
        maker = [sys.executable, "-m", "benchmarks.engines.types.make_gguf"]
        _made(wide, [*maker, str(self.environments.folder(LLAMA)), str(self.model)])
        if kind == BFLOAT16:
            return wide
        narrow = self._beside(f"{GGUF[kind]}.gguf")
        return _made(
            narrow,
            [self.environments.llama_binary("llama-quantize"), str(wide)],
            after=[GGUF[kind]],
        )

    def openvino(self, kind: str) -> Path:
        """Return a folder that optimum-intel exports."""
        exporter = [
            *(self.environments.python(OPENVINO), "-m", "optimum.commands.optimum_cli"),
            *("export", "openvino", "--model", str(self.model)),
            *("--task", "text-generation-with-past"),
            # Without it, a model of this size keeps its type.
            *(() if kind == BFLOAT16 else ("--weight-format", kind)),
        ]
        return _made(self._beside(f"openvino-{kind}"), exporter)

    def _beside(self, name: str) -> Path:
        return self.model.with_name(f"{self.model.name}-{name}")


def _made(
    path: Path,
    command: Sequence[str],
    after: Sequence[str] = (),
    environment: Mapping[str, str] = _OFFLINE,
) -> Path:
    """Return `path`, made by the command, whose last argument but `after` it is, unless it
    exists."""
    if path.exists():
        return path
    print(f"making {path.name}", flush=True)
    part, log = path.with_name(f"part-{path.name}"), path.with_name(f"{path.name}.log")
    shutil.rmtree(part, ignore_errors=True)
    part.unlink(missing_ok=True)
    with log.open("w") as output:
        ran = subprocess.run(
            [*command, str(part), *after],
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
        )
    if ran.returncode or not part.exists():
        raise EngineError(f"{path.name} cannot be made; {log_end(log)}")
    part.rename(path)
    return path


def weight_bytes(path: Path) -> int:
    """Return the size of a checkpoint's weights. Embeddings are tied, so a decoding step reads all
    of them."""
    files = [path] if path.is_file() else [file for form in _WEIGHTS for file in path.glob(form)]
    return sum(file.stat().st_size for file in files)
