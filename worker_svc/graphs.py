"""Passes over decode-only batches, recorded once and replayed: a GPU does such a pass in less time
than a host takes to launch its kernels one by one."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

import structlog
import torch

log = structlog.get_logger()

MOST_ROWS: Final = 512
_SMALL: Final = (1, 2, 4, 8)
_STRIDE: Final = 16

Replay = Callable[[], object]


class Capturer(Protocol):
    """Records what a function has a device do."""

    def capture(self, function: Callable[[], object]) -> Replay:
        """Runs the function and records it: the result does the same again, with whatever is in
        the same memory then. RuntimeError if it cannot be recorded."""
        ...


class CudaCapturer:
    """CUDA graphs, which share one pool of memory: they are never replayed at the same time."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], object]) -> Replay:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # Kernels are compiled and libraries take their memory outside of a graph.
            function()
            # What waits for the device cannot be recorded, and some of torch's releases do not
            # recover from a recording that broke off: so it is tried before.
            with _nobody_waits():
                function()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # The outer one because a recording that fails leaves its stream the current one.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream),
        ):
            function()
        replay: Replay = graph.replay
        return replay


@contextmanager
def _nobody_waits() -> Iterator[None]:
    """RuntimeError for operations that wait for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class DecodeGraphs:
    """One per size of batch."""

    def __init__(self, replays: Mapping[int, Replay]) -> None:
        self._replays = replays
        self._sizes = sorted(replays)

    def size_for(self, num_rows: int) -> int | None:
        """The smallest that so many rows fit into; None for more than there is a graph for."""
        index = bisect_left(self._sizes, num_rows)
        return self._sizes[index] if index < len(self._sizes) else None

    def replay(self, size: int) -> None:
        self._replays[size]()


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8 and multiples of 16, until every batch of so many rows, or of MOST_ROWS if that
    is less, has one."""
    most = min(max_num_seqs, MOST_ROWS)
    sizes = [*_SMALL, *range(_STRIDE, most + _STRIDE, _STRIDE)]
    return (*(size for size in sizes if size < most), min(s for s in sizes if s >= most))


def capture_decode(
    sizes: Iterable[int], prepare: Callable[[int], Callable[[], object]], capturer: Capturer
) -> DecodeGraphs:
    """Records what `prepare` gives for each size; none, with a warning that says why, if one cannot
    be recorded. The largest comes first, so that the others find room in its memory."""
    replays: dict[int, Replay] = {}
    for size in sorted(sizes, reverse=True):
        try:
            replays[size] = capturer.capture(prepare(size))
        except RuntimeError as error:
            reason = _first_cause(error)
            log.warning("no graphs: every step is launched anew", size=size, reason=reason)
            return DecodeGraphs({})
    log.info("graphs", sizes=sorted(replays))
    return DecodeGraphs(replays)


def _first_cause(error: BaseException) -> str:
    """What broke a recording; that it was broken is said behind it, when it ends."""
    while isinstance(error.__context__, RuntimeError) and not error.__suppress_context__:
        error = error.__context__
    return str(error).partition("\n")[0]
