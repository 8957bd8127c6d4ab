"""Makes Triton's interpreter faster without a change of its results.

More than half of its time would have no effect. It replaces the functions of the language at every
call of a device function, though the launch of the kernel has replaced them. And it computes each
operation on integers a second time, to find overflows that it ignores unless it debugs.
"""

import dataclasses
from collections.abc import Callable
from types import FunctionType

import triton.language as tl
from triton.runtime import interpreter


class _Replacements:
    """Replaces the functions of the language once per launch and module of the language."""

    def __init__(self, replace: Callable[[FunctionType], "interpreter._LangPatchScope"]) -> None:
        self._replace = replace
        # The modules of the language that a running launch has replaced; empty without a launch.
        self._replaced: set[int] = set()

    def __call__(self, function: FunctionType) -> "interpreter._LangPatchScope":
        visible = {
            id(lang)
            for lang in (tl, tl.core)
            if any(value is lang for value in function.__globals__.values())
        }
        if self._replaced and visible <= self._replaced:
            return interpreter._LangPatchScope()
        scope = self._replace(function)
        if not self._replaced:
            self._restore_at_the_end_of_the_launch(scope)
        self._replaced |= visible
        return scope

    def _restore_at_the_end_of_the_launch(self, scope: "interpreter._LangPatchScope") -> None:
        restore = scope.restore

        def restore_all() -> None:
            self._replaced.clear()
            restore()

        scope.restore = restore_all


def hasten() -> None:
    """Leave out what has no effect."""
    builder = interpreter.interpreter_builder
    options = builder.options
    builder.options = dataclasses.replace(options, sanitize_overflow=options.debug)
    if not isinstance(interpreter._patch_lang, _Replacements):
        interpreter._patch_lang = _Replacements(interpreter._patch_lang)
