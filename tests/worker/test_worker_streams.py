"""Which stream of a GPU has which work, with torch's streams and events made up."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch

from worker_svc.gpu import streams as streams_module
from worker_svc.gpu.streams import CudaStreams

_DEVICE = 3


class MadeUpCuda:
    """Streams by name, and what was queued on them, in order."""

    def __init__(self) -> None:
        self.current = "main"
        self.queued: list[tuple[str, ...]] = []

    def current_stream(self, device: int) -> "MadeUpStream":
        assert device == _DEVICE
        return MadeUpStream(self, self.current)

    @contextmanager
    def stream(self, stream: "MadeUpStream") -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def event(self, *, enable_timing: bool = False, blocking: bool = False) -> "MadeUpEvent":
        return MadeUpEvent(self, enable_timing, blocking)


class MadeUpStream:
    def __init__(self, cuda: MadeUpCuda, name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_stream(self, other: "MadeUpStream") -> None:
        self._cuda.queued.append((self.name, "waits for", other.name))


class MadeUpEvent:
    def __init__(self, cuda: MadeUpCuda, has_timing: bool, blocking: bool) -> None:
        self._cuda = cuda
        self._kind = ("timing",) * has_timing + ("blocking",) * blocking

    def record(self, stream: MadeUpStream) -> None:
        self._cuda.queued.append((stream.name, "records", *self._kind))


class MadeUpTensor:
    """A tensor on the device."""

    def __init__(self, cuda: MadeUpCuda) -> None:
        self._cuda = cuda
        self.copied: torch.Tensor | None = None

    def copy_(self, host: torch.Tensor, *, non_blocking: bool = False) -> None:
        assert non_blocking
        self.copied = host
        self._cuda.queued.append((self._cuda.current, "copies"))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> MadeUpCuda:
    cuda = MadeUpCuda()
    parts: dict[str, Any] = {
        "Stream": lambda: MadeUpStream(cuda, "side"),
        "Event": cuda.event,
        "current_device": lambda: _DEVICE,
        "current_stream": cuda.current_stream,
        "stream": cuda.stream,
    }
    for name, part in parts.items():
        monkeypatch.setattr(torch.cuda, name, part)
    return cuda


def test_an_event_follows_the_work_of_the_caller_s_stream(cuda: MadeUpCuda) -> None:
    streams = CudaStreams()
    streams.record_event()
    # As during a capture, which has a stream of its own.
    with cuda.stream(MadeUpStream(cuda, "graphs")):
        streams.record_event()
    streams.record_event()
    assert [name for name, *_ in cuda.queued] == ["main", "graphs", "main"]
    assert {tuple(kind) for _, *kind in cuda.queued} == {("records", "timing")}


def test_the_event_of_inputs_follows_their_copy(cuda: MadeUpCuda) -> None:
    host, device = torch.arange(4), MadeUpTensor(cuda)
    CudaStreams().send(host, cast("Any", device))
    assert device.copied is host
    assert cuda.queued == [("main", "copies"), ("main", "records", "timing", "blocking")]


def test_copies_to_the_host_wait_for_the_steps_and_not_the_reverse(
    cuda: MadeUpCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(tensor: torch.Tensor) -> torch.Tensor:
        cuda.queued.append((cuda.current, "copies"))
        return tensor

    monkeypatch.setattr(streams_module, "_pinned_copy", copy)
    CudaStreams().fetch([torch.arange(4)])
    assert cuda.queued == [
        ("side", "waits for", "main"),
        ("side", "copies"),
        ("side", "records", "blocking"),
    ]
    assert cuda.current == "main"
