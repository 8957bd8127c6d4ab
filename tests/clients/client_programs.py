"""The programs in `examples/clients`, built where their toolchain is installed."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import google.rpc

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "examples" / "clients"
# The protos of googleapis, as the package googleapis-common-protos has them.
GOOGLEAPIS = Path(next(iter(google.rpc.__path__))).parents[1]
# Debian's Go packages are outside of Go's own modules.
DEBIAN_GO = Path("/usr/share/gocode")
PROTOS = [
    f"quire/v1/{name}.proto"
    for name in ("inference", "conversation", "structured_output", "model", "tokenizer")
]


@dataclass(frozen=True)
class Program:
    """One client: what it needs, and how it is built into a folder."""

    needs: tuple[str, ...]
    # Returns the command, to which the step and the targets are added.
    build: Callable[[Path], Sequence[str]]
    # Whether it speaks gRPC; HTTP otherwise.
    is_grpc: bool = True
    # Folders that it needs besides the programs.
    folders: tuple[Path, ...] = ()

    def missing(self) -> list[str]:
        """What is not installed."""
        programs = [name for name in self.needs if shutil.which(name) is None]
        return programs + [str(folder) for folder in self.folders if not folder.exists()]


def _run(*command: str | Path, folder: Path = ROOT, **environment: str) -> None:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def _python(name: str) -> Callable[[Path], Sequence[str]]:
    return lambda folder: [sys.executable, str(SOURCES / "python" / name)]


def _node(folder: Path) -> Sequence[str]:
    project = folder / "examples" / "clients" / "node"
    # Without the packages of a developer's own run.
    shutil.copytree(SOURCES / "node", project, ignore=shutil.ignore_patterns("node_modules"))
    (folder / "protos").symlink_to(ROOT / "protos")
    _run("npm", "install", "--silent", "--no-audit", "--no-fund", folder=project)
    return ["node", str(project / "client.js")]


def _go(folder: Path) -> Sequence[str]:
    sources = folder / "src"
    sources.mkdir()
    _run("protoc", "-I", "protos", f"--go_out={sources}", f"--go-grpc_out={sources}", *PROTOS)
    shutil.copytree(SOURCES / "go", sources / "client")
    paths = f"{folder}:{DEBIAN_GO}"
    binary = str(folder / "client")
    _run("go", "build", "-o", binary, "client", folder=folder, GO111MODULE="off", GOPATH=paths)
    return [binary]


def _cpp(folder: Path) -> Sequence[str]:
    _run("cmake", "-S", SOURCES / "cpp", "-B", folder, f"-DGOOGLEAPIS={GOOGLEAPIS}")
    _run("cmake", "--build", folder, "--parallel", "2")
    return [str(folder / "client")]


def _ruby(folder: Path) -> Sequence[str]:
    plugin = f"--plugin=protoc-gen-grpc={shutil.which('grpc_ruby_plugin')}"
    _run("protoc", "-I", "protos", f"--ruby_out={folder}", f"--grpc_out={folder}", plugin, *PROTOS)
    return ["ruby", "-I", str(folder), str(SOURCES / "ruby" / "client.rb")]


def _curl(folder: Path) -> Sequence[str]:
    return ["bash", str(SOURCES / "curl" / "client.sh")]


PROGRAMS = {
    "python": Program((), _python("grpc_client.py")),
    "openai": Program((), _python("openai_client.py"), is_grpc=False),
    "node": Program(("node", "npm"), _node),
    "go": Program(
        ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc"),
        _go,
        folders=(DEBIAN_GO / "src" / "google.golang.org" / "grpc",),
    ),
    "cpp": Program(
        ("cmake", "g++", "pkg-config", "protoc", "grpc_cpp_plugin"),
        _cpp,
        folders=(Path("/usr/include/grpcpp"),),
    ),
    "ruby": Program(
        ("ruby", "protoc", "grpc_ruby_plugin"),
        _ruby,
        folders=(Path("/usr/share/rubygems-integration/all/gems"),),
    ),
    "curl": Program(("curl", "jq"), _curl, is_grpc=False),
}
