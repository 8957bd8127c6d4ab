"""Makes model folders of GGUF files for local stacks."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from quire.launcher.errors import LaunchError

_MAKE_FOLDER: Final = "worker_svc.model.quantized.gguf_folder"
# Another version of one of these may make another folder of the same file.
_PACKAGES: Final = ("quire", "transformers", "gguf")


def model_folder(model: str) -> str:
    """The model if it is not a GGUF file, else a folder of it, with config and tokenizer, in the
    user's cache. LaunchError with the reason if the file cannot be served."""
    if not model.endswith(".gguf"):
        return model
    file = Path(model).expanduser().resolve()
    try:
        status = file.stat()
    except OSError as error:
        raise LaunchError(f"{model}: {error.strerror}") from error
    identity = f"{file} {status.st_size} {status.st_mtime_ns} {_converter()}".encode()
    folder = _cache() / f"{file.stem}-{hashlib.sha256(identity).hexdigest()[:16]}"
    if not folder.exists():
        _make(file, folder)
    return str(folder)


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "quire" / "gguf"


def _converter() -> str:
    """What makes folders: versions of packages, and a digest of the modules that convert."""
    versions = [f"{name}={_version(name)}" for name in _PACKAGES]
    # In a source tree they change without a version.
    modules = hashlib.sha256()
    for path in sorted(_modules().glob("gguf_*.py")):
        modules.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return " ".join((*versions, modules.hexdigest()))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _modules() -> Path:
    """The folder of the modules. They are not imported, because they import torch."""
    package, *folders = _MAKE_FOLDER.split(".")[:-1]
    spec = find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return Path(*list(places or ())[:1], *folders)


def _make(file: Path, folder: Path) -> None:
    """In a process of its own, which imports torch. A folder is complete once it has its name."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent)
    try:
        command = [sys.executable, "-m", _MAKE_FOLDER, str(file), unfinished]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            reason = made.stderr.strip().splitlines()[-1:] or [f"exit status {made.returncode}"]
            raise LaunchError(reason[0])
        if not folder.exists():
            os.rename(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
