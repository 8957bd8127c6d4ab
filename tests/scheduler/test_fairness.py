"""Fair shares: the queue's order against a simple model, and the bound of the paper."""

import itertools
from array import array
from collections import Counter
from collections.abc import Iterator

import pytest
from bare_groups import bare_group
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.fairness import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST, FairShares
from scheduler_svc.core.queue import WaitingQueue, assigned_order
from scheduler_svc.core.request import Params
from scheduler_svc.core.sequence import Sequence

PARAMS = Params(1.0, 0, 1.0, 0, 8, frozenset())
_arrivals = itertools.count()


def new(principal: str, length: int = 10, priority: int = 0, output: int = 0) -> Sequence:
    """A sequence that arrives now; it will have `output` tokens."""
    arrival = next(_arrivals)
    group = bare_group(str(arrival), PARAMS, principal=principal)
    group.order = (priority, arrival)
    sequence = Sequence(arrival, group, 0, array("I", range(length)), length, length)
    sequence.max_num_tokens = length + output
    return sequence


class Server:
    """A batch of at most `capacity` tokens, to which the queue's head is admitted while it fits;
    each step samples one token per sequence."""

    def __init__(self, capacity: int) -> None:
        self.shares = FairShares()
        self.queue = WaitingQueue(self.shares)
        self.capacity = capacity
        self.running: list[Sequence] = []
        # Cost of the service of each principal.
        self.served: Counter[str] = Counter()

    def step(self) -> None:
        self.shares.count_output(self.running)
        self.shares.apply_output()
        used = sum(sequence.max_num_tokens for sequence in self.running)
        while (head := self.queue.head) and used + head.max_num_tokens <= self.capacity:
            self.queue.dispatch(head)
            head.num_cached_tokens = 0
            used += head.max_num_tokens
            self.running.append(head)
            self.served[head.group.key.principal] += INPUT_TOKEN_COST * head.num_prompt_tokens
        for sequence in self.running:
            if len(sequence.token_ids) < sequence.max_num_tokens:
                sequence.token_ids.append(1)
                self.served[sequence.group.key.principal] += OUTPUT_TOKEN_COST
        ended = [s for s in self.running if len(s.token_ids) == s.max_num_tokens]
        self.shares.count_output(ended)
        self.running = [sequence for sequence in self.running if sequence not in ended]


LENGTHS = st.tuples(st.integers(1, 40), st.integers(1, 40))


@settings(derandomize=True, database=None, deadline=None, max_examples=30)
@given(
    st.lists(st.lists(LENGTHS, min_size=1, max_size=5), min_size=2, max_size=4),
    st.sampled_from([80, 200, 1000]),
    st.booleans(),
)
def test_backlogged_principals_differ_at_most_by_the_papers_bound(kinds, capacity, is_weighted):
    """Each principal repeats its own kinds of requests, and always has some in the queue."""
    server = Server(capacity)
    requests: dict[str, Iterator[tuple[int, int]]] = {}
    for number, lengths in enumerate(kinds):
        name = f"p{number}"
        requests[name] = itertools.cycle(lengths)
        server.shares.of(name).weight = 1.0 + number * is_weighted
    differences = {pair: [0.0] for pair in itertools.combinations(requests, 2)}
    for _ in range(300):
        for name, lengths in requests.items():
            while server.queue.num_tokens_of(name) < 2 * capacity:
                length, output = next(lengths)
                server.queue.add(new(name, length, output=output))
        server.step()
        normal = {name: server.served[name] / server.shares.of(name).weight for name in requests}
        for (one, other), seen in differences.items():
            seen.append(normal[one] - normal[other])
    bound = 2 * max(INPUT_TOKEN_COST * 40, OUTPUT_TOKEN_COST * capacity)
    for seen in differences.values():
        assert max(seen) - min(seen) <= bound


@pytest.mark.parametrize(
    ("weights", "ratio"), [((1.0, 1.0), 1.0), ((1.0, 2.0), 2.0), ((3.0, 1.0), 1 / 3)]
)
def test_backlogged_principals_are_served_by_their_weights(weights, ratio):
    """One sends long prompts with short outputs, the other the opposite."""
    server = Server(capacity=400)
    kinds = {"a": (90, 10), "b": (5, 60)}
    for name, weight in zip(kinds, weights, strict=True):
        server.shares.of(name).weight = weight
    for _ in range(3000):
        for name, (length, output) in kinds.items():
            while server.queue.num_tokens_of(name) < 1000:
                server.queue.add(new(name, length, output=output))
        server.step()
    assert server.served["b"] / server.served["a"] == pytest.approx(ratio, rel=0.05)


def test_a_principal_that_was_idle_has_no_credit():
    server = Server(capacity=100)
    for _ in range(50):
        server.queue.add(new("a", 10, output=10))
    for _ in range(100):
        server.step()
    server.shares.count_output(server.running)
    server.shares.apply_output()
    for _ in range(50):
        server.queue.add(new("b", 10, output=10))
        server.queue.add(new("a", 10, output=10))
    before = server.served.copy()
    for _ in range(100):
        server.step()
    gained = server.served - before
    assert abs(gained["a"] - gained["b"]) <= 2 * OUTPUT_TOKEN_COST * server.capacity
    assert gained["a"] > 0.4 * gained["b"]


def test_the_first_request_of_a_principal_precedes_the_flood_of_another():
    queue = WaitingQueue(FairShares())
    flood = [new("a", 50) for _ in range(100)]
    for one in flood:
        queue.add(one)
    queue.dispatch(flood[0])
    late = new("b", 50)
    queue.add(late)
    assert queue.first(3) == [flood[1], late, flood[2]]


def test_priorities_precede_fair_shares():
    queue = WaitingQueue(FairShares())
    low, high = new("a", priority=1), new("b", 1000, priority=0)
    again = new("b", 1000, priority=0)
    for one in (low, high, again):
        queue.add(one)
    assert queue.first(3) == [high, again, low]


def test_what_returns_from_a_lane_is_refunded_and_what_was_admitted_is_not():
    shares = FairShares()
    queue = WaitingQueue(shares)
    one = new("a", 50)
    queue.add(one)
    queue.dispatch(one)
    assert shares.of("a").counter == 50 * INPUT_TOKEN_COST
    queue.add(one)
    assert shares.of("a").counter == 0
    queue.dispatch(one)
    # Admitted, preempted with a token, and recomputed.
    one.num_cached_tokens, one.has_precedence = 0, True
    one.token_ids.append(1)
    queue.add(one)
    queue.dispatch(one)
    shares.count_output([one])
    shares.apply_output()
    # Its lane is lost, and the token is sampled again.
    del one.token_ids[-1]
    shares.count_output([one])
    one.token_ids.append(1)
    shares.count_output([one])
    shares.apply_output()
    assert shares.of("a").counter == 50 * INPUT_TOKEN_COST + OUTPUT_TOKEN_COST


def test_siblings_share_the_charge_of_their_prompt():
    shares = FairShares()
    queue = WaitingQueue(shares)
    first = new("a", 50)
    sibling = Sequence(first.sequence_id, first.group, 1, first.token_ids[:], 50, 50)
    sibling.has_precedence = True
    for one in (first, sibling):
        queue.add(one)
        queue.dispatch(one)
    assert shares.of("a").counter == 50 * INPUT_TOKEN_COST


def test_a_lane_keeps_the_order_of_the_dispatch_between_principals():
    queue = WaitingQueue(FairShares())
    sequences = [new("a", 50), new("a", 50), new("a", 50), new("b", 70), new("b", 70)]
    for one in sequences:
        queue.add(one)
    dispatched = queue.first(5)
    for one in dispatched:
        queue.dispatch(one)
    assert [one.group.key.principal for one in dispatched] == ["a", "b", "a", "b", "a"]
    by_arrival = sorted(dispatched, key=lambda one: one.order)
    assert sorted(by_arrival, key=assigned_order) == dispatched


@settings(derandomize=True, database=None, deadline=None)
@given(st.permutations(list(range(8))), st.data())
def test_a_lane_keeps_todays_order_of_one_principal(arrivals, data):
    """By precedence, priority and arrival, in whatever order sequences are dispatched."""
    queue = WaitingQueue(FairShares())
    sequences = [new("a", priority=data.draw(st.integers(-1, 1))) for _ in arrivals]
    for arrival in arrivals:
        sequences[arrival].has_precedence = data.draw(st.booleans())
        queue.add(sequences[arrival])
        queue.dispatch(sequences[arrival])
    wanted = sorted(sequences, key=lambda one: (not one.has_precedence, one.order))
    assert sorted(sequences, key=assigned_order) == wanted


MOVES = st.lists(
    st.tuples(st.sampled_from("aabbc"), st.integers(1, 9), st.integers(0, 1), st.integers(0, 4)),
    max_size=40,
)


@settings(derandomize=True, database=None, deadline=None)
@given(MOVES)
def test_the_queue_is_a_simple_model(moves):
    """The model sorts all sequences anew for each dispatch, and has its own counters."""
    queue = WaitingQueue(FairShares())
    waiting: list[Sequence] = []
    counters: dict[str, float] = {}
    last = None
    for principal, length, priority, num_dispatched in moves:
        one = new(principal, length, priority)
        if not any(other.group.key.principal == principal for other in waiting):
            heads = {
                name: min((o for o in waiting if o.group.key.principal == name), key=_order)
                for name in {other.group.key.principal for other in waiting}
            }
            rivals = [counters[name] for name, o in heads.items() if o.order[0] == priority]
            least = min(rivals, default=counters.get(last, 0.0))
            counters[principal] = max(counters.get(principal, 0.0), least)
        waiting.append(one)
        queue.add(one)
        expected = queue.first(num_dispatched)
        for _ in range(min(num_dispatched, len(waiting))):
            chosen = min(
                waiting, key=lambda o: (o.order[0], counters[o.group.key.principal], o.order)
            )
            assert queue.head is chosen is expected.pop(0)
            waiting.remove(chosen)
            last = chosen.group.key.principal
            counters[last] += INPUT_TOKEN_COST * chosen.num_prompt_tokens
            queue.dispatch(chosen)
    assert len(queue) == len(waiting) == len(list(queue))


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order
