"""What a leader hands to the next one about tenants: the successor behaves as it would have."""

import itertools
from array import array

import pytest
from bare_groups import bare_group
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.fairness import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST, FairShares, ShareState
from scheduler_svc.core.limits import PrincipalLimits, RateState, Reservation, UsedRates
from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.quotas import Quotas
from scheduler_svc.core.request import Params
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.tenants import TenantsState, export_tenants, restore_tenants
from scheduler_svc.engine.tenant_writer import from_json, to_json

PARAMS = Params(1.0, 0, 1.0, 0, 8, frozenset())
PRINCIPALS = ("a", "b", "c")


class Scheduler:
    """Shares, quotas and the queue of one leader after another, on clocks that differ."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.shares, self.quotas = FairShares(), Quotas(lambda: self.now_s)
        self.queue = WaitingQueue(self.shares)
        self.arrivals = itertools.count()
        self.live: list[Sequence] = []
        self.running: list[Sequence] = []

    def set_tenant(self, principal: str, weight: int, limits: PrincipalLimits) -> None:
        self.shares.of(principal).weight = 2.0**weight
        self.quotas.set_limits(principal, limits)

    def submit(self, principal: str, length: int, priority: int = 0) -> float | str | None:
        """Submit a prompt; the reason why it is refused."""
        new = Reservation(principal, length, is_resumable=False)
        if error := self.quotas.error(new, self.queue.num_tokens_of(principal)):
            return error.message
        self.quotas.reserve(new)
        self.quotas.confirm(new)
        arrival = next(self.arrivals)
        group = bare_group(str(arrival), PARAMS, principal=principal)
        group.order = (priority, arrival)
        sequence = Sequence(arrival, group, 0, array("I", range(length)), length, length)
        group.sequences = [sequence]
        self.quotas.started(group)
        self.live.append(sequence)
        self.charge_output()
        self.queue.add(sequence)
        return None

    def dispatch(self) -> int | None:
        """Dispatch the head of the queue, and admit it; return its id."""
        self.charge_output()
        if (head := self.queue.head) is None:
            return None
        self.queue.dispatch(head)
        head.num_cached_tokens = 0
        self.running.append(head)
        return head.sequence_id

    def sample(self, count: int) -> None:
        """Sample tokens of all that run, and end the oldest."""
        for sequence in self.running:
            sequence.token_ids.extend(range(count))
            sequence.has_precedence = True
        self.charge_output()
        for ended in self.running[:1]:
            self.running.remove(ended)
            self.live.remove(ended)
            self.quotas.ended(ended.group)

    def charge_output(self) -> None:
        self.count_output()
        self.shares.apply_output()

    def count_output(self) -> None:
        self.quotas.count_output(self.shares.count_output(self.running))

    def export(self) -> TenantsState:
        self.count_output()
        again = [sequence for sequence in self.running if not sequence.num_output_tokens]
        return export_tenants(self.shares, self.quotas, again)

    def change_leader(self, pause_s: float = 0.0) -> None:
        """Continue as another leader, which finds the requests and the stored state."""
        stored = to_json(self.export(), self.now_s)
        # A clock that began elsewhere.
        self.now_s += 1e6
        self.shares, self.quotas = FairShares(), Quotas(lambda: self.now_s)
        self.queue = WaitingQueue(self.shares)
        for sequence in self.live:
            self.quotas.started(sequence.group)
            sequence.group.prompt_charge = 0.0
            sequence.num_counted_tokens = sequence.num_output_tokens
            if not sequence.num_output_tokens:
                sequence.num_cached_tokens = None
                self.queue.add(sequence)
        self.running = [other for other in self.running if other.num_output_tokens]
        self.now_s += pause_s
        state = from_json(stored, self.now_s - pause_s) if stored else TenantsState()
        restore_tenants(state, self.shares, self.quotas)


LIMITS = st.just(PrincipalLimits()) | st.builds(
    PrincipalLimits,
    requests_per_minute=st.none() | st.integers(1, 8),
    tokens_per_minute=st.none() | st.integers(1, 300),
    live_requests=st.none() | st.integers(1, 8),
    waiting_tokens=st.none() | st.integers(1, 300),
)
TENANTS = st.tuples(*[st.tuples(st.integers(-1, 2), LIMITS) for _ in PRINCIPALS])
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from(PRINCIPALS), st.integers(1, 50)),
        st.tuples(st.just("submit"), st.sampled_from(PRINCIPALS), st.integers(1, 50)),
        st.tuples(st.just("dispatch"), st.none(), st.none()),
        st.tuples(st.just("sample"), st.none(), st.integers(1, 20)),
        st.tuples(st.just("wait"), st.none(), st.integers(1, 40)),
    ),
    min_size=30,
    max_size=60,
)


def play(
    tenants: list[tuple[int, PrincipalLimits]],
    moves: list[tuple[str, str | None, int | None]],
    exports_at: int,
    changes_leader: bool,
) -> list[object]:
    """What a scheduler does in these moves if its state is exported before one of them."""
    scheduler, seen = Scheduler(), []

    def set_tenants() -> None:
        for principal, (weight, limits) in zip(PRINCIPALS, tenants, strict=True):
            scheduler.set_tenant(principal, weight, limits)

    set_tenants()
    for number, (kind, principal, amount) in enumerate(moves):
        if number == exports_at:
            scheduler.change_leader() if changes_leader else scheduler.export()
        if kind == "submit":
            # Weight and limits come with each request.
            weight, limits = tenants[PRINCIPALS.index(principal)]
            scheduler.set_tenant(principal, weight, limits)
            seen.append(scheduler.submit(principal, amount))
        elif kind == "dispatch":
            seen.append(scheduler.dispatch())
            # The first token follows at once.
            for sequence in scheduler.running[-1:]:
                if not sequence.num_output_tokens:
                    sequence.token_ids.append(1)
                    sequence.has_precedence = True
        elif kind == "sample":
            scheduler.sample(amount)
        else:
            scheduler.now_s += amount
    while (dispatched := scheduler.dispatch()) is not None:
        seen.append(dispatched)
    return seen


@settings(derandomize=True, database=None, deadline=None, max_examples=150)
@given(TENANTS, MOVES, st.data())
def test_a_new_leader_continues_as_the_previous_one_would(tenants, moves, data):
    at = data.draw(st.integers(1, len(moves) - 1))
    assert play(tenants, moves, at, True) == play(tenants, moves, at, False)


def test_a_prompt_that_the_next_leader_dispatches_again_is_charged_once():
    scheduler = Scheduler()
    for principal in "ab":
        scheduler.set_tenant(principal, 0, PrincipalLimits())
        scheduler.submit(principal, 50)
    scheduler.dispatch()
    assert scheduler.shares.of("a").counter == 50 * INPUT_TOKEN_COST
    scheduler.change_leader()
    assert scheduler.shares.of("a").counter == 0
    scheduler.dispatch()
    assert scheduler.shares.of("a").counter == 50 * INPUT_TOKEN_COST


def test_rates_are_refilled_between_leaders():
    scheduler = Scheduler()
    limits = PrincipalLimits(requests_per_minute=6, live_requests=100)
    scheduler.set_tenant("a", 0, limits)
    assert [scheduler.submit("a", 1) is None for _ in range(7)] == [True] * 6 + [False]
    scheduler.change_leader(pause_s=20)
    scheduler.set_tenant("a", 0, limits)
    assert [scheduler.submit("a", 1) is None for _ in range(3)] == [True] * 2 + [False]


def test_new_limits_keep_what_was_refilled_before():
    scheduler = Scheduler()
    scheduler.set_tenant("a", 0, PrincipalLimits(requests_per_minute=6))
    assert [scheduler.submit("a", 1) is None for _ in range(7)] == [True] * 6 + [False]
    scheduler.now_s += 20
    scheduler.set_tenant("a", 0, PrincipalLimits(requests_per_minute=6, live_requests=100))
    assert [scheduler.submit("a", 1) is None for _ in range(3)] == [True] * 2 + [False]


def test_output_that_is_counted_and_not_charged_is_exported():
    scheduler = Scheduler()
    for principal in "ab":
        scheduler.set_tenant(principal, 0, PrincipalLimits())
        scheduler.submit(principal, 10)
    for _ in "ab":
        scheduler.dispatch()
    for sequence in scheduler.running:
        sequence.token_ids.append(1)
    scheduler.shares.count_output(scheduler.running)
    charged = 10 * INPUT_TOKEN_COST + OUTPUT_TOKEN_COST
    assert scheduler.export().shares == dict.fromkeys("ab", ShareState(1.0, charged))


def test_a_principal_that_was_not_stored_is_treated_as_an_idle_one():
    """It came after the leader's last write."""
    shares = FairShares()
    shares.of("late")
    shares.restore({"a": ShareState(2.0, 500.0), "b": ShareState(1.0, 800.0)}, "b")
    assert [shares.of(name).counter for name in ("a", "b", "late")] == [500, 800, 800]
    assert shares.of("a").weight == 2


def test_what_is_stored_is_bounded_by_the_tenants_that_differ_from_new_ones():
    scheduler = Scheduler()
    for number in range(100):
        name = f"t{number}"
        scheduler.set_tenant(name, 0, PrincipalLimits(requests_per_minute=60))
        scheduler.submit(name, 10)
        scheduler.dispatch()
        scheduler.sample(1)
    assert len(scheduler.export().rates) == 100
    scheduler.now_s += 60
    # Their buckets are full, nothing of them is live, and none is ahead of the last one.
    assert scheduler.export() == TenantsState({"t99": ShareState(1.0, 1200)}, "t99")


def test_an_idle_tenant_that_was_served_more_than_others_stays_behind_them():
    scheduler = Scheduler()
    for name, length in (("a", 50), ("b", 10), ("b", 10)):
        scheduler.submit(name, length)
    assert [scheduler.dispatch(), scheduler.dispatch()] == [0, 1]
    scheduler.sample(1)
    scheduler.change_leader()
    scheduler.submit("a", 10)
    scheduler.submit("b", 10)
    assert [scheduler.dispatch() for _ in range(3)] == [2, 4, 3]


def test_nothing_is_stored_before_the_first_request():
    scheduler = Scheduler()
    scheduler.set_tenant("a", 1, PrincipalLimits(requests_per_minute=1))
    assert scheduler.export() == TenantsState()
    assert to_json(scheduler.export(), 0.0) == b""


def test_json_is_relative_to_the_time_of_writing():
    used = UsedRates(requests=RateState(60, 130.0), tokens=None)
    state = TenantsState({"ä/\n": ShareState(0.1, 1 / 3)}, "ä/\n", {"ä/\n": used})
    moved = from_json(to_json(state, now_s=100.0), written_s=500.0)
    assert moved.shares == state.shares
    assert moved.last_served == state.last_served
    assert moved.rates == {"ä/\n": UsedRates(requests=RateState(60, 530.0))}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"x",
        b"1",
        b"[]",
        b"{}",
        b"\xff",
        b'{"shares": {}, "last_served": "a", "rates": {}}',
        b'{"shares": {"a": {"weight": 0, "counter": 1}}, "last_served": null, "rates": {}}',
        b'{"shares": {}, "last_served": null, "rates": {"a": {"requests": null, "tokens":'
        b' {"per_minute": 0, "full_in_s": 1}}}}',
    ],
)
def test_malformed_text_is_refused(text):
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        from_json(text, 0.0)
