"""The order of the waiting queue."""

from array import array

import pytest
from bare_groups import bare_group
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.fairness import FairShares
from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.request import Params
from scheduler_svc.core.sequence import Sequence


def sequence(
    arrival: int, priority: int = 0, choice: int = 0, preempted: bool = False, length: int = 3
) -> Sequence:
    params = Params(1.0, 0, 1.0, 0, 8, frozenset())
    group = bare_group(str(arrival), params)
    group.order = (priority, arrival)
    waiting = Sequence(
        arrival * 16 + choice, group, choice, array("I", range(length)), length, length
    )
    waiting.has_precedence = preempted
    return waiting


@pytest.fixture
def queue() -> WaitingQueue:
    return WaitingQueue(FairShares())


def test_the_first_arrival_is_the_head(queue):
    second, first = sequence(2), sequence(1)
    queue.add(second)
    queue.add(first)
    assert list(queue) == [first, second]
    assert queue.head is first


def test_a_smaller_priority_precedes_an_earlier_arrival(queue):
    early, urgent = sequence(1, priority=1), sequence(2, priority=0)
    queue.add(early)
    queue.add(urgent)
    assert list(queue) == [urgent, early]


def test_preempted_sequences_precede_new_ones_of_any_priority(queue):
    urgent, again = sequence(1, priority=-1), sequence(2, priority=5, preempted=True)
    queue.add(urgent)
    queue.add(again)
    assert list(queue) == [again, urgent]


def test_choices_of_one_request_stay_in_order(queue):
    choices = [sequence(1, choice=choice, preempted=True) for choice in range(4)]
    for choice in reversed(choices):
        queue.add(choice)
    assert list(queue) == choices


def test_tokens_are_counted(queue):
    short, long = sequence(1, length=5), sequence(2, length=100)
    queue.add(short)
    queue.add(long)
    assert queue.num_tokens == 105
    assert queue.remove(short)
    assert queue.num_tokens == 100


def test_a_sequence_that_is_not_queued_is_not_removed(queue):
    queue.add(sequence(1))
    assert not queue.remove(sequence(2))
    # A different sequence with the same key.
    assert not queue.remove(sequence(1))
    assert len(queue) == 1
    assert queue.first(5) == list(queue)


def test_an_empty_queue_has_no_head(queue):
    assert queue.head is None
    assert not queue


@settings(derandomize=True, database=None, deadline=None)
@given(st.permutations(list(range(8))), st.data())
def test_the_order_of_adding_does_not_matter(arrivals, data):
    waiting = [
        sequence(arrival, data.draw(st.integers(-1, 1)), preempted=data.draw(st.booleans()))
        for arrival in arrivals
    ]
    queue = WaitingQueue(FairShares())
    for one in waiting:
        queue.add(one)
    wanted = sorted(waiting, key=lambda one: (not one.has_precedence, one.order))
    assert list(queue) == wanted
    for one in waiting:
        assert queue.remove(one)
    assert queue.num_tokens == 0
