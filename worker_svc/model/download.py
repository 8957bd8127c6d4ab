"""Downloads a model's files from the hub, and reports the bytes."""

import io
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from tqdm import tqdm

# Called with the bytes so far and their total.
OnBytes = Callable[[int, int], object]


def download(model: str, revision: str | None, files: list[str], on_bytes: OnBytes) -> Path:
    """The folder in the hub's cache with the files that match these patterns. `on_bytes` is called
    while files are downloaded, in several threads. OSError or ValueError as of the hub's client."""
    # It takes a tenth of a second to import.
    hub = import_module("huggingface_hub")
    return Path(
        hub.snapshot_download(
            model, revision=revision, allow_patterns=files, tqdm_class=_bars_of(on_bytes)
        )
    )


def _bars_of(on_bytes: OnBytes) -> type[Any]:
    """Progress bars that draw nothing. The client makes one of files, and one or two of bytes."""

    class ByteCount(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B"
            # The bar writes a line feed to it when it is closed.
            super().__init__(*args, **{**options, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> bool | None:
            drawn = super().update(n)
            if self._counts_bytes and self.total:
                on_bytes(int(self.n), int(self.total))
            return bool(drawn)

        def display(self, *_: Any, **__: Any) -> None:
            """Draw nothing."""

    return ByteCount
