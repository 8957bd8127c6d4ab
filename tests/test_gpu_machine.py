"""Imports of `make test-gpu` and `make bench-gpu` on a GPU machine without network: each module is
installed there or downloaded by `make gpu-packages`."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
from python_statements import statements

from scripts.requirements import requirements

_ROOT = Path(__file__).resolve().parent.parent
_OURS = {
    "benchmarks",
    "demo",
    "gateway_svc",
    "kernels",
    "quire",
    "scheduler_svc",
    "scripts",
    "worker_svc",
}
# Installed on the GPU machine; the second line are dependencies of the first.
_INSTALLED = {
    *("torch", "triton", "transformers", "grpc", "google", "numpy", "safetensors", "tokenizers"),
    *("jinja2", "huggingface_hub", "click", "packaging", "typing_extensions", "yaml"),
    *("pytest", "hypothesis", "rich", "typer"),
}
# Packages whose modules have other names, or that bring another package.
_MODULES = {
    "fastapi": ("fastapi", "starlette"),
    "grpcio-health-checking": ("grpc_health",),
    "grpcio-reflection": ("grpc_reflection",),
    "grpcio-status": ("grpc_status",),
    "grpcio-tools": ("grpc_tools",),
    "jsonschema": ("jsonschema", "referencing"),
    "opentelemetry-api": ("opentelemetry",),
    "pydantic-settings": ("pydantic_settings", "pydantic", "pydantic_core"),
    "pytest-xdist": ("xdist",),
}
# Imported only to test whether they are installed, or in an environment of their own. Without
# `gguf`, tests are skipped.
_OPTIONAL = {
    *("awq", "flash_attn", "gguf", "gptqmodel", "openvino", "openvino_genai", "vllm", "xgrammar"),
}


def imported(folder: str) -> dict[str, str]:
    """Return top-level third-party modules, each with a file that imports it, without stubs."""
    found: dict[str, str] = {}
    for path in (_ROOT / folder).rglob("*.py"):
        for node in statements(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            found.update((name.partition(".")[0], str(path)) for name in names)
    helpers = {path.stem for path in (_ROOT / "tests").rglob("*.py")}
    known = sys.stdlib_module_names | _OURS | helpers
    return {name: path for name, path in found.items() if name not in known}


def downloaded() -> set[str]:
    """Return the modules of the packages that `make gpu-packages` downloads."""
    recipe = (_ROOT / "Makefile").read_text().partition("\ngpu-packages:")[2].partition("\n\n")[0]
    names: list[str] = []
    for extra, chosen in re.findall(r"requirements\.py (\w+)(?: \| grep -E '(.*)')?", recipe):
        required = requirements(tomllib.loads((_ROOT / "pyproject.toml").read_text()), extra)
        names += [line for line in required if re.search(chosen, line)]
    assert names
    packages = [re.split(r"[^\w-]", name)[0] for name in names]
    return {
        module
        for package in packages
        for module in _MODULES.get(package, (package.replace("-", "_"),))
    }


@pytest.mark.slow
def test_imports_of_tests_and_benchmarks_are_available() -> None:
    available = _INSTALLED | _OPTIONAL | downloaded()
    for folder in ("tests", *sorted(_OURS - {"demo", "scripts"})):
        missing = {name: path for name, path in imported(folder).items() if name not in available}
        assert not missing
