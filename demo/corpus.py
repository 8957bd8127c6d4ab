"""The corpus: prose from the documentation strings of the running interpreter's standard library.

Nothing is downloaded. The text comes from the docstrings of the pure Python modules, which are
parsed and never imported, from those of the built-in and extension modules, and from the topics
behind `help()`. The same interpreter build always gives the same documents in the same order.
"""

import ast
import contextlib
import hashlib
import importlib
import inspect
import re
import sys
import sysconfig
import types
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

MAX_DOCUMENT_CHARS = 600

_SKIPPED_FOLDERS = frozenset(
    {"dist-packages", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tests"}
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Types of members that a compiled module defines itself; programs may add others to `sys`.
_COMPILED = (
    type,
    types.BuiltinFunctionType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)
_COLUMNS = re.compile(r"\S {3,}\S")
# Interactive examples, rulers, literal blocks, signatures and grammar rules.
_NOT_PROSE = re.compile(r">>>|\.\.\.|[-=+*~^_#|]{3,}|::|->|[<>{}\\]")


def collect_documents() -> list[str]:
    """Every distinct document, in a deterministic order.

    A document is one or more paragraphs of prose, each on one line, with an empty line between
    them; at most `MAX_DOCUMENT_CHARS` characters.
    """
    return list(dict.fromkeys(doc for text in _texts() for doc in split_documents(text)))


def digest(documents: list[str]) -> str:
    """SHA-256, in hexadecimal, of the documents as one NUL-separated UTF-8 text."""
    return hashlib.sha256("\0".join(documents).encode()).hexdigest()


def split_documents(text: str) -> Iterator[str]:
    """Split a documentation string into documents and drop all but prose."""
    document = ""
    for paragraph in filter(_is_prose, map(_unwrap, _paragraphs(text))):
        if document and len(document) + len(paragraph) + 2 > MAX_DOCUMENT_CHARS:
            yield document
            document = ""
        document = f"{document}\n\n{paragraph}" if document else paragraph
    if document:
        yield document


def _texts() -> Iterator[str]:
    yield from _python_docstrings(Path(sysconfig.get_path("stdlib")))
    for module in _compiled_modules():
        yield from _compiled_docstrings(module)
    for _, text in sorted(topics.items()):
        yield text


def _python_docstrings(root: Path) -> Iterator[str]:
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            tree = ast.parse(path.read_bytes())
            documented = (node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED))
            yield from filter(None, map(ast.get_docstring, documented))


def _compiled_modules() -> Iterator[types.ModuleType]:
    for name in sorted(sys.stdlib_module_names):
        spec = find_spec(name)
        if spec and (spec.origin or "").endswith(("built-in", ".so", ".pyd")):
            # The shared library that an extension wraps may be absent, such as Tk's.
            with contextlib.suppress(ImportError):
                yield importlib.import_module(name)


def _compiled_docstrings(module: types.ModuleType) -> Iterator[str]:
    yield inspect.cleandoc(module.__doc__ or "")
    for _, member in sorted(vars(module).items()):
        yield from _docstring(member)
        if isinstance(member, type):
            for _, attribute in sorted(vars(member).items()):
                yield from _docstring(attribute)


def _docstring(member: object) -> Iterator[str]:
    if isinstance(member, _COMPILED) and isinstance(member.__doc__, str):
        yield inspect.cleandoc(member.__doc__)


def _paragraphs(text: str) -> list[str]:
    return re.split(r"\n\s*\n", text.strip())


def _unwrap(paragraph: str) -> str:
    """Join a paragraph into one line; empty for lists (uneven indents) and columns."""
    indents = {len(line) - len(line.lstrip()) for line in paragraph.splitlines()}
    uneven = len(indents) > 1 or _COLUMNS.search(paragraph)
    return "" if uneven else " ".join(paragraph.split())


def _is_prose(paragraph: str) -> bool:
    plain = sum(char.isalpha() or char in " ,.'" for char in paragraph)
    return (
        len(paragraph.split()) >= 3
        and len(paragraph) <= MAX_DOCUMENT_CHARS
        and paragraph.isascii()
        and paragraph[0].isalpha()
        and plain >= 0.92 * len(paragraph)
        and _NOT_PROSE.search(paragraph) is None
    )
