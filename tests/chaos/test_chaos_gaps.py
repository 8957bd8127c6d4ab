"""Pauses of streams, their percentiles, and the threshold of a gap."""

import pytest

from benchmarks.chaos import streams as streams_module
from benchmarks.chaos.gaps import Pause, Spread, Window, longest_pause, percentile, threshold_s
from benchmarks.chaos.mix import catalogue
from benchmarks.chaos.streams import Reference, Stream, Streams
from quire.client.outputs import RequestOutput, Usage

WINDOW = Window(10.0, 20.0)


def seconds(times_s: list[float]) -> float | None:
    pause = longest_pause(times_s, WINDOW)
    return pause and pause.seconds


def test_a_pause_counts_where_it_overlaps_the_window():
    assert seconds([9.0, 12.0, 13.0, 18.0, 19.0]) == 5.0
    assert longest_pause([9.0, 12.0, 13.0], WINDOW) == Pause(9.0, 12.0)
    # In full length, including the part outside of the window.
    assert seconds([2.0, 11.0, 12.0]) == 9.0
    assert seconds([19.0, 26.0]) == 7.0
    assert seconds([1.0, 30.0]) == 29.0


def test_pauses_outside_the_window_do_not_count():
    assert seconds([1.0, 9.0, 11.0, 12.0, 21.0, 22.0, 40.0]) == 9.0
    assert longest_pause([1.0, 8.0, 10.0], WINDOW) is None
    assert longest_pause([20.0, 25.0], WINDOW) is None


def test_fewer_than_two_times_have_no_pause():
    assert longest_pause([], WINDOW) is None
    assert longest_pause([15.0], WINDOW) is None


def test_percentiles_are_values_that_occurred():
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, 50) == 50.0
    assert percentile(values, 99) == 99.0
    assert percentile(values, 100) == 100.0
    assert percentile([3.0], 50) == percentile([3.0], 99) == 3.0
    assert percentile([1.0, 2.0], 50) == 1.0


def test_a_spread_of_nothing_counts_nothing():
    assert Spread.of([]) == Spread(0)
    assert Spread.of([2.0, 1.0, 4.0]) == Spread(3, 2.0, 4.0, 4.0)


def test_the_threshold_follows_ordinary_pauses_within_limits():
    assert threshold_s([]) == 0.25
    assert threshold_s([0.03] * 200) == 0.25
    assert threshold_s([0.1] * 200) == pytest.approx(0.3)
    # A single outlier has no effect.
    assert threshold_s([0.1] * 199 + [9.0]) == pytest.approx(0.3)
    assert threshold_s([2.0] * 200) == 0.5


class Clock:
    """Stands in for `time`."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def test_the_time_to_the_first_message_is_apart_from_the_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(streams_module, "time", clock)
    [request] = catalogue(0, 1)
    streams = Streams([], [], 1, 0)
    output = RequestOutput("id", "model", "p", None, [], Usage(1, 0, 0))
    stream = Stream("id", Reference(request, output, 0.0))
    streams._current[0] = stream
    clock.now_s = 9.0
    # It waits.
    assert streams.first_waits(Window(1.0, 2.0)) == [9.0]
    assert streams.pauses(Window(1.0, 2.0)) == []
    stream.note()
    clock.now_s = 12.0
    assert streams.first_waits(Window(1.0, 2.0)) == [9.0]
    assert streams.first_waits(Window(10.0, 11.0)) == []
    assert streams.pauses(Window(1.0, 11.0)) == [(stream, Pause(9.0, 12.0))]
    # The present is no message of a finished stream.
    stream.note()
    stream.is_finished, clock.now_s = True, 50.0
    assert streams.pauses(Window(1.0, 40.0)) == [(stream, Pause(9.0, 12.0))]
