"""What the second act says of a stream."""

from quire.demo_faults import Witness
from quire.outputs import CompletionDelta, RequestDelta


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def _delta(first, *token_ids):
    return RequestDelta(
        "r", "m", [CompletionDelta(0, "", first, list(token_ids), None, None)], None
    )


def test_a_text_that_is_whole_lost_nothing():
    witness = Witness()
    witness.see(_delta(0, 7))
    witness.see(_delta(1, 8, 9))
    assert witness.verdict([7, 8, 9]) == "0 tokens lost, 0 repeated, 0 changed"


def test_what_is_lost_repeated_and_changed_is_counted():
    witness = Witness()
    for first, token_id in ((0, 7), (0, 7), (2, 5)):
        witness.see(_delta(first, token_id))
    assert witness.verdict([7, 8, 9]) == "1 tokens lost, 1 repeated, 1 changed"


def test_the_longest_pause_behind_a_fault_is_its_gap():
    clock = Clock()
    witness = Witness(clock)
    clock.now = 9.0
    witness.see(_delta(0, 7))
    witness.killed("worker-0")
    # What was under way comes at once.
    for clock.now, place in ((9.1, 1), (9.9, 2), (10.0, 3)):
        witness.see(_delta(place, 7))
    witness.killed("scheduler-1")
    clock.now = 12.0
    witness.see(_delta(4, 7))
    assert [(f.name, f.num_tokens) for f in witness.faults] == [("worker-0", 1), ("scheduler-1", 4)]
    assert [round(f.gap_s, 1) for f in witness.faults] == [0.8, 2.0]
