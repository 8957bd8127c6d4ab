"""A progress bar over prompts."""

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeAlias

from tqdm.auto import tqdm

from quire.client.outputs import RequestOutput

# True or False, None for a bar on a terminal, or a function that makes one, called as `tqdm`.
UseTqdm: TypeAlias = bool | Callable[..., Any] | None


class PromptProgress:
    """Counts ended prompts and the tokens of their completions."""

    def __init__(self, num_prompts: int, use_tqdm: UseTqdm) -> None:
        if use_tqdm is None:
            use_tqdm = num_prompts > 1 and sys.stderr.isatty()
        self._bar: Any = None
        if use_tqdm is not False:
            make = tqdm if use_tqdm is True else use_tqdm
            self._bar = make(total=num_prompts, desc="Processed prompts", dynamic_ncols=True)
        self._num_tokens = 0

    def advance(self, result: RequestOutput | Exception) -> None:
        if self._bar is None:
            return
        if isinstance(result, RequestOutput):
            self._num_tokens += result.usage.completion_tokens
            self._bar.set_postfix_str(f"{self._num_tokens:,} tokens", refresh=False)
        self._bar.update(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
