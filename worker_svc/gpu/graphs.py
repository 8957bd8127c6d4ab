"""CUDA graphs of decode batches: a GPU runs such a pass in less time than the host needs to launch
its kernels one by one."""

import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

import structlog
import torch

log = structlog.get_logger()

MAX_GRAPH_ROWS: Final = 512
_SMALL: Final = (1, 2, 4, 8)
_STRIDE: Final = 16

Replay = Callable[[], object]


class Capturer(Protocol):
    """Captures the device work of a function."""

    def capture(self, function: Callable[[], object]) -> Replay:
        """Run the function and capture it. The result repeats the work on the current contents of
        the same memory. RuntimeError if it cannot be captured."""
        ...


class CudaCapturer:
    """CUDA graphs, which share one memory pool because they are never replayed concurrently."""

    def __init__(self, error_mode: str = "global") -> None:
        """`error_mode` is torch's `capture_error_mode`."""
        self._error_mode = error_mode
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], object]) -> Replay:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # Kernels are compiled and libraries allocate their memory outside of a graph.
            function()
            # An operation that waits for the device cannot be captured, and some releases of torch
            # do not recover from an aborted capture. So this is checked first.
            with _forbid_synchronization():
                function()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # A failed capture leaves its stream the current one; the outer context restores it.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                capture_error_mode=self._error_mode,
            ),
        ):
            function()
        replay: Replay = graph.replay
        return replay


@contextmanager
def _forbid_synchronization() -> Iterator[None]:
    """RuntimeError for operations that wait for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch calls the mode a prototype.
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class DecodeGraphs:
    """One graph per batch size."""

    def __init__(self, replays: Mapping[int, Replay]) -> None:
        self._replays = replays
        self._sizes = sorted(replays)

    def size_for(self, num_rows: int) -> int | None:
        """The smallest size with that many rows; None if there is none."""
        index = bisect_left(self._sizes, num_rows)
        return self._sizes[index] if index < len(self._sizes) else None

    def replay(self, size: int) -> None:
        self._replays[size]()


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8 and multiples of 16, up to the first that is at least `max_num_seqs` or
    MAX_GRAPH_ROWS."""
    most = min(max_num_seqs, MAX_GRAPH_ROWS)
    sizes = [*_SMALL, *range(_STRIDE, most + _STRIDE, _STRIDE)]
    return (*(size for size in sizes if size < most), min(s for s in sizes if s >= most))


def capture_decode(
    sizes: Iterable[int], prepare: Callable[[int], Callable[[], object]], capturer: Capturer
) -> DecodeGraphs:
    """Capture the function that `prepare` returns for each size. If one cannot be captured there
    are no graphs, and a warning has the reason. The largest is captured first, because smaller ones
    fit into its memory."""
    replays: dict[int, Replay] = {}
    for size in sorted(sizes, reverse=True):
        try:
            replays[size] = capturer.capture(prepare(size))
        except RuntimeError as error:
            reason = first_cause(error)
            log.warning("no CUDA graphs: every step launches its kernels", size=size, reason=reason)
            return DecodeGraphs({})
    log.info("graphs", sizes=sorted(replays))
    return DecodeGraphs(replays)


def first_cause(error: BaseException) -> str:
    """The error that aborted a capture; the end of the capture raises another one."""
    while isinstance(error.__context__, RuntimeError) and not error.__suppress_context__:
        error = error.__context__
    return str(error).partition("\n")[0]
