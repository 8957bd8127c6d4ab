"""The recorder of a stream with faults."""

from quire.client.outputs import CompletionDelta, RequestDelta
from quire.demo.faults import StreamRecorder


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def _delta(first, *token_ids):
    return RequestDelta(
        "r", "m", [CompletionDelta(0, "", first, list(token_ids), None, None)], None
    )


def test_a_complete_text_has_no_losses():
    recorder = StreamRecorder()
    recorder.record(_delta(0, 7))
    recorder.record(_delta(1, 8, 9))
    assert recorder.verdict([7, 8, 9]) == "0 tokens lost, 0 repeated, 0 changed"


def test_lost_repeated_and_changed_tokens_are_counted():
    recorder = StreamRecorder()
    for first, token_id in ((0, 7), (0, 7), (2, 5)):
        recorder.record(_delta(first, token_id))
    assert recorder.verdict([7, 8, 9]) == "1 tokens lost, 1 repeated, 1 changed"


def test_the_gap_of_a_fault_is_the_longest_pause_after_it():
    clock = Clock()
    recorder = StreamRecorder(clock)
    clock.now = 9.0
    recorder.record(_delta(0, 7))
    recorder.killed("worker-0")
    # Tokens in flight arrive at once.
    for clock.now, index in ((9.1, 1), (9.9, 2), (10.0, 3)):
        recorder.record(_delta(index, 7))
    recorder.killed("scheduler-1")
    clock.now = 12.0
    recorder.record(_delta(4, 7))
    assert [(f.name, f.num_tokens) for f in recorder.faults] == [
        ("worker-0", 1),
        ("scheduler-1", 4),
    ]
    assert [round(f.gap_s, 1) for f in recorder.faults] == [0.8, 2.0]
