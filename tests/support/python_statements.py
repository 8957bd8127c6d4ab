"""The statements of a Python module."""

import ast
from collections.abc import Iterator


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements inside `node`, clauses such as `except` too. Expressions, which are most of a
    tree and contain no statements, are not visited."""
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, part, ()):
            yield child
            yield from statements(child)
