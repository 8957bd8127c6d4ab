import asyncio
from contextlib import AbstractContextManager
from types import SimpleNamespace

import pytest
from bare_groups import bare_group
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from waiting import until

from scheduler_svc.cluster.load import ShardLoad
from scheduler_svc.core.limits import (
    LimitShares,
    PrincipalLimits,
    Reservation,
    Usage,
    parts_of,
    rate_share_of,
    share_of,
)
from scheduler_svc.core.quotas import Quotas
from scheduler_svc.core.request import Params
from scheduler_svc.engine.tenant_exchange import Report, TenantExchange
from scheduler_svc.store.errors import StoreUnavailable


@given(st.integers(0, 50), st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_shares_add_up_to_the_limit(limit: int, used: list[int]) -> None:
    shares = [share_of(limit, used, shard) for shard in range(len(used))]
    assert sum(shares) == max(limit, sum(used))
    assert all(share >= mine for share, mine in zip(shares, used, strict=True))
    spare = [share - mine for share, mine in zip(shares, used, strict=True)]
    assert max(spare) - min(spare) <= 1


@given(st.integers(0, 50), st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_what_several_want_is_divided_in_proportion(amount: int, wanted: list[int]) -> None:
    parts = parts_of(amount, wanted)
    assert sum(parts) == min(amount, sum(wanted))
    assert all(0 <= part <= one for part, one in zip(parts, wanted, strict=True))


def test_the_first_get_what_rounding_leaves() -> None:
    assert parts_of(5, [5, 5]) == [3, 2]
    assert parts_of(1, [0, 3, 3]) == [0, 1, 0]
    assert parts_of(9, [2, 3]) == [2, 3]


LIVE = "live_requests"


def test_a_single_shard_has_the_whole_limit() -> None:
    shares = LimitShares()
    assert shares.rate("a", "tokens_per_minute", 7) == 7
    assert shares.claim("a", LIVE, 3, 0, 1, keeps_spare=False) == 3
    assert shares.granted("a", LIVE, 3, None) == 3


def test_a_share_of_a_rate_follows_what_is_used() -> None:
    shares = LimitShares()
    shares.update(1, [{}, {}, {}, {}])
    # Each shard has at least one.
    assert shares.rate("a", "requests_per_minute", 2) == 1
    assert shares.rate("a", "requests_per_minute", None) is None
    shares.update(1, [{"a": Usage(requests_per_minute=2)}, {"a": Usage(requests_per_minute=6)}])
    assert shares.rate("a", "requests_per_minute", 10) == 7
    assert shares.rate("b", "requests_per_minute", 10) == 5


def test_a_share_of_a_count_is_what_is_claimed_and_no_other_claims() -> None:
    shares = LimitShares()
    shares.update(1, [{"a": Usage(live_requests=2, claimed_live_requests=4)}, {}, {}])
    # Two and one are used. A third of the rest: another part is the other's, one is left.
    assert shares.claim("a", LIVE, 9, used=1, wanted=0, keeps_spare=True) == 3
    # The other wants it.
    assert shares.claim("a", LIVE, 9, used=1, wanted=0, keeps_spare=False) == 1
    # The other claims two more than it uses, so the rest is divided in proportion.
    assert shares.claim("a", LIVE, 9, used=1, wanted=4, keeps_spare=False) == 5
    assert shares.claim("a", LIVE, 9, used=1, wanted=10, keeps_spare=False) == 6
    assert shares.granted("a", LIVE, 9, None) == 0, "it has claimed nothing yet"
    others = {"a": Usage(live_requests=2, claimed_live_requests=4)}
    shares.update(1, [others, {"a": Usage(live_requests=1, claimed_live_requests=7)}, {}])
    assert shares.granted("a", LIVE, 9, held=0) == 5
    assert shares.granted("a", LIVE, 9, held=6) == 6, "it was granted before the other claimed"
    assert shares.granted("a", LIVE, 5, held=6) == 5, "the limit is a new one"


def test_the_shard_with_the_most_left_is_named_until_that_is_given_away() -> None:
    shares = LimitShares()
    reports: list[dict[str, Usage]] = [
        {"a": Usage(live_requests=1, claimed_live_requests=2)},
        {"a": Usage(live_requests=2, claimed_live_requests=2)},
        {"a": Usage(live_requests=1, claimed_live_requests=3)},
        {},
    ]
    shares.update(1, list(reports))
    named = [shares.other_with("a", LIVE, 9, 1) for _ in range(4)]
    assert named == [2, 0, 2, None]
    assert shares.other_with("b", LIVE, 9, 1) is None
    # What was sent counts until the shard's report has changed, or for some reports.
    reports[2] = {"a": Usage(live_requests=2, claimed_live_requests=3)}
    shares.update(1, list(reports))
    assert [shares.other_with("a", LIVE, 9, 1) for _ in range(2)] == [2, None]
    for _ in range(4):
        shares.update(1, list(reports))
    assert [shares.other_with("a", LIVE, 9, 1) for _ in range(2)] == [0, None]
    # More is claimed than there is.
    shares.update(0, [{}, {"a": Usage(claimed_live_requests=4)}, {"a": Usage(4, 4, 4, 4, 4)}])
    shares.update(0, [{}, {"a": Usage(claimed_live_requests=4)}, reports[2]])
    assert [shares.other_with("a", LIVE, 5, 1) for _ in range(3)] == [1, 1, None]
    # Of a rate, each shard has its share, too, if it has not reported any use.
    used = Usage(requests_per_minute=10, left_requests_per_minute=1)
    shares.update(0, [{"a": used}, {"a": used}, {}])
    named = [shares.other_with("a", "requests_per_minute", 26, 1) for _ in range(4)]
    assert named == [2, 1, 2, None]


class SharedLimit:
    """Several shards that admit requests of a tenant. Their reports are on the way in between."""

    def __init__(self, num_shards: int, limit: int) -> None:
        self.limit = limit
        self.table: dict[int, dict[str, Usage]] = {}
        self.shards = [Quotas(clock=lambda: 0.0) for _ in range(num_shards)]
        # Reports that are on the way, and what Redis has responded to others.
        self.sent: dict[int, dict[str, Usage]] = {}
        self.read: dict[int, list[dict[str, Usage]]] = {}
        self.num_refused = 0
        # Whether all know that one of them needs what the others do not use.
        self.is_scarce = False
        # By shard, requests that wait until its exchange ends.
        self.waiting: list[list[AbstractContextManager[None]]] = [[] for _ in self.shards]
        for number, quotas in enumerate(self.shards):
            quotas.divide(number, [{} for _ in self.shards])
            quotas.set_limits("a", PrincipalLimits(live_requests=limit))

    @property
    def num_live(self) -> int:
        return sum(quotas.num_live("a") for quotas in self.shards)

    def admit(self, shard: int) -> None:
        new = Reservation("a", 1, is_resumable=False)
        if self.shards[shard].excess(new, 0) is None:
            self.shards[shard].reserve(new)
        else:
            waiting = self.shards[shard].wanting([new])
            waiting.__enter__()
            self.waiting[shard].append(waiting)
            self.num_refused += 1

    def end(self, shard: int) -> None:
        if self.shards[shard].num_live("a"):
            self.shards[shard].cancel(Reservation("a", 1, is_resumable=False))

    def step(self, shard: int) -> None:
        """The next part of an exchange."""
        if shard in self.read:
            self.shards[shard].divide(shard, self.read.pop(shard))
            for waiting in self.waiting[shard]:
                waiting.__exit__(None, None, None)
            self.waiting[shard].clear()
        elif shard in self.sent:
            own = self.table[shard] = self.sent.pop(shard)
            others = [self.table.get(other, {}) for other in range(len(self.shards))]
            others[shard] = own
            self.read[shard] = others
        else:
            keeps_spare = not self.is_scarce
            self.sent[shard] = self.shards[shard].report(
                1.0, lambda principal: 0, keeps_spare=keeps_spare
            )

    def exchange(self, shard: int) -> None:
        while shard in self.sent or shard in self.read:
            self.step(shard)
        for _ in range(3):
            self.step(shard)


SHARED_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "admit", "end", "step", "step", "step"]), st.integers(0, 3)
    ),
    max_size=120,
)


@given(st.integers(0, 9), SHARED_STEPS)
def test_a_count_is_never_exceeded_and_all_of_it_can_be_used(
    limit: int, steps: list[tuple[str, int]]
) -> None:
    shared = SharedLimit(4, limit)
    for what, shard in steps:
        getattr(shared, what)(shard)
        assert shared.num_live <= limit
    # Then one shard wants all that is left, and the others know of that.
    shared.is_scarce = True
    for shard in (0, 1, 3, 0, 1, 3):
        shared.exchange(shard)
    for _ in range(2):
        for _ in range(limit - shared.num_live):
            shared.admit(2)
        shared.exchange(2)
    for _ in range(limit - shared.num_live):
        shared.admit(2)
    assert shared.num_live == limit


def test_shards_keep_a_rate_together() -> None:
    """A tenant that sends as much as it can gets one bucket and a minute's rate in a minute."""
    now_s, num_shards, limit = 0.0, 4, 60
    shards = [Quotas(clock=lambda: now_s) for _ in range(num_shards)]
    new, num_accepted = Reservation("a", 5, is_resumable=False), 0
    reports: list[dict[str, Usage]] = [{} for _ in shards]
    while now_s < 60:
        for number, quotas in enumerate(shards):
            reports[number] = quotas.report(1.0, lambda principal: 0)
            quotas.divide(number, reports)
            quotas.set_limits("a", PrincipalLimits(requests_per_minute=limit))
        for _ in range(10):
            for quotas in shards:
                if quotas.error(new, 0) is None:
                    quotas.reserve(new)
                    num_accepted += 1
            now_s += 0.1
    assert 1.8 * limit <= num_accepted <= 2.1 * limit


def test_a_burst_in_one_shard_does_not_raise_its_share() -> None:
    assert [rate_share_of(60, [600, 0, 0, 0], shard) for shard in range(4)] == [60, 0, 0, 0]
    assert [rate_share_of(60, [600, 200], shard) for shard in range(2)] == [45, 15]
    assert [rate_share_of(60, [20, 0], shard) for shard in range(2)] == [40, 20]


def test_quotas_refuse_beyond_the_share_and_name_the_limit() -> None:
    quotas = Quotas(clock=lambda: 0.0)
    quotas.set_limits("a", PrincipalLimits(live_requests=4))
    new = Reservation("a", 5, is_resumable=False)
    quotas.divide(0, [{}, {"a": Usage(live_requests=1, claimed_live_requests=1)}])
    for _ in range(2):
        quotas.reserve(new)
    excess = quotas.excess(new, 0)
    assert excess is not None
    assert excess.is_divided, "others have a part of it"
    assert "4 live requests" in excess.error().message
    with quotas.wanting([new]):
        report = quotas.report(1.0, lambda principal: 7)["a"]
    assert (report.live_requests, report.waiting_tokens) == (2, 17)
    assert report.claimed_live_requests == 3
    assert report.requests_per_minute > 0
    others = {"a": Usage(live_requests=1, claimed_live_requests=1)}
    quotas.divide(0, [{"a": report}, others])
    assert quotas.error(new, 0) is None
    quotas.reserve(new)
    assert quotas.error(new, 0) is not None
    for _ in range(2):
        quotas.reserve(new)
    excess = quotas.excess(new, 0)
    assert excess is not None
    assert not excess.is_divided, "this shard alone has used the limit"


def test_a_prompt_longer_than_the_limit_waits_alone_on_all_shards() -> None:
    quotas = Quotas(clock=lambda: 0.0)
    quotas.set_limits("a", PrincipalLimits(waiting_tokens=10))
    new = Reservation("a", 50, is_resumable=False)
    assert quotas.error(new, 0) is None
    for num_claimed, is_refused in ((1, True), (0, False)):
        others = {"a": Usage(waiting_tokens=num_claimed, claimed_waiting_tokens=num_claimed)}
        quotas.divide(0, [{}, others])
        with quotas.wanting([new]):
            report = quotas.report(1.0, lambda principal: 0)
        quotas.divide(0, [report, others])
        assert (quotas.error(new, 0) is not None) == is_refused


def test_a_request_that_moves_takes_its_part_of_the_share_along() -> None:
    quotas = Quotas(clock=lambda: 0.0)
    quotas.set_limits("a", PrincipalLimits(live_requests=2))
    group = bare_group("x", Params(1.0, 0, 1.0, 0, 8, frozenset()), principal="a")
    quotas.started(group)
    quotas.divide(0, [{}, {}])
    report = quotas.report(1.0, lambda principal: 0)
    quotas.divide(0, [report, {}])
    quotas.given(group)
    assert quotas.num_live("a") == 0
    assert quotas._usage["a"].shares.live_requests == report["a"].claimed_live_requests - 1


UNREADABLE = (
    *(b"", b"{}", b"[1]", b'[1, [], {"a": [1, 2]}]', b'[1, [], {"a": ["1"]}]', b"[1, [], [2]]"),
    *(b'[1, ["x"], {}]', b"[1, 2, {}]"),
)


@pytest.mark.parametrize("packed", UNREADABLE)
def test_an_unreadable_report_is_an_error(packed: bytes) -> None:
    with pytest.raises(ValueError, match=r"value|usage|items|literal|iterable"):
        Report.parse(packed)


async def test_an_unreadable_report_is_logged_once_and_changes_nothing() -> None:
    table, engine = Table(), Engine()
    exchange = TenantExchange(0, 1, engine, cluster_of(2), table)
    theirs = Report(7, [], {"a": Usage(live_requests=3, claimed_live_requests=5)})
    table.reports[1] = theirs.pack()
    await exchange.exchange()
    with capture_logs() as logs:
        for packed in (*UNREADABLE[:2], UNREADABLE[1]):
            table.reports[1] = packed
            await exchange.exchange()
    assert [line["shard"] for line in logs] == [1, 1]
    assert exchange._known[1] == theirs


def test_a_report_is_what_was_packed() -> None:
    report = Report(7, [3, 0], {"a": Usage(1, 2, 3, 4, 5, 6.5, 7, 8, 9, 10, 11)})
    assert Report.parse(report.pack()) == report


class Table:
    """The reports of all shards, in place of Redis."""

    def __init__(self) -> None:
        self.reports: dict[int, bytes] = {}
        self.is_away = False
        self.num_reads = 0

    async def exchange(self, shard: int, report: bytes) -> dict[int, bytes]:
        if self.is_away:
            raise StoreUnavailable("no connection")
        self.reports[shard] = report
        return dict(self.reports)

    async def read_reports(self) -> dict[int, bytes]:
        self.num_reads += 1
        return dict(self.reports)


def cluster_of(num_shards: int) -> SimpleNamespace:
    return SimpleNamespace(
        map=SimpleNamespace(num_shards=num_shards),
        loads=[],
        listen=lambda listener: None,
        stop_listening=lambda listener: None,
        beat_soon=lambda: None,
    )


class Shares:
    """The counters of an engine, without the engine."""

    has_tenants = True

    def __init__(self) -> None:
        self.counters = {"a": 0.0}
        self.own = 0.0

    def served(self, principal: str) -> float:
        return self.own

    def add_served(self, principal: str, cost: float) -> None:
        self.counters[principal] += cost


class Engine:
    def __init__(self) -> None:
        self.quotas, self.shares, self.waiting = Quotas(), Shares(), self
        self.quotas.set_limits("a", PrincipalLimits(live_requests=8))

    def count_output(self) -> None:
        pass

    def num_tokens_of(self, principal: str) -> int:
        return 0


async def test_shards_divide_limits_and_add_up_what_tenants_were_served() -> None:
    table = Table()
    engines = [Engine(), Engine()]
    cluster = cluster_of(2)
    exchanges = [TenantExchange(shard, 1, engines[shard], cluster, table) for shard in (0, 1)]
    new = Reservation("a", 5, is_resumable=False)
    for _ in range(5):
        engines[0].quotas.reserve(new)
    for _ in range(2):
        await asyncio.gather(*(exchange.exchange() for exchange in exchanges))
    # Of eight, five are used. The other shard has no requests.
    assert [engine.quotas._usage["a"].shares.live_requests for engine in engines] == [6, 0]
    engines[0].shares.own = 12.0
    for exchange in exchanges:
        await exchange.exchange()
    await exchanges[0].exchange()
    assert engines[1].shares.counters["a"] == 12.0
    assert engines[0].shares.counters["a"] == 0.0
    # A new leader of the other shard begins to count again.
    exchanges[0] = TenantExchange(0, 2, engines[0], cluster, table)
    engines[0].shares.own = 5.0
    for exchange in exchanges:
        await exchange.exchange()
    assert engines[1].shares.counters["a"] == 12.0


async def test_a_new_leader_has_no_share_until_it_has_asked() -> None:
    engine, table, new = Engine(), Table(), Reservation("a", 5, is_resumable=False)
    table.reports[0] = Report(7, [], {"a": Usage(live_requests=3, claimed_live_requests=5)}).pack()
    exchange = TenantExchange(1, 1, engine, cluster_of(2), table)
    assert engine.quotas.error(new, 0) is not None
    running = asyncio.create_task(exchange.run())
    with engine.quotas.wanting([new]):
        assert await exchange.ask()
    assert engine.quotas.error(new, 0) is None
    # Redis is away.
    table.is_away = True
    assert not await exchange.ask()
    running.cancel()


async def test_a_request_for_room_waits_until_the_others_have_acknowledged_it() -> None:
    table, cluster = Table(), cluster_of(2)
    asking, other = (TenantExchange(shard, 1, Engine(), cluster, table) for shard in (0, 1))
    running = asyncio.create_task(asking.run())
    first, second = (asyncio.create_task(asking.ask(30.0)) for _ in range(2))
    await other.exchange()
    await until(lambda: table.num_reads > 1, "reports to be read")
    assert not first.done()
    assert asking.num_asks == 3
    cluster.loads = [ShardLoad(num_asks=2), ShardLoad()]
    await other.exchange()
    async with asyncio.timeout(10):
        assert await first
    # The second request came later.
    assert not second.done()
    cluster.loads = [ShardLoad(num_asks=3), ShardLoad()]
    await other.exchange()
    async with asyncio.timeout(10):
        assert await second
        # It has no leader.
        cluster.map.num_shards = 3
        assert await asking.ask(0.05)
    running.cancel()


async def test_what_a_former_leader_has_asked_is_no_acknowledgement() -> None:
    table, cluster = Table(), cluster_of(2)
    former, other = (TenantExchange(shard, 1, Engine(), cluster, table) for shard in (0, 1))
    running = asyncio.create_task(former.run())
    for _ in range(5):
        await former.ask(0.001)
    running.cancel()
    cluster.loads = [ShardLoad(num_asks=former.num_asks), ShardLoad()]
    await other.exchange()
    asking = TenantExchange(0, 1000, Engine(), cluster, table)
    running = asyncio.create_task(asking.run())
    asked = asyncio.create_task(asking.ask(30.0))
    await until(lambda: table.num_reads > 1, "reports to be read")
    assert not asked.done()
    cluster.loads = [ShardLoad(num_asks=asking.num_asks), ShardLoad()]
    await other.exchange()
    async with asyncio.timeout(10):
        assert await asked
    running.cancel()


async def test_the_first_shard_reports_what_is_used_before_others_begin() -> None:
    engine, table, new = Engine(), Table(), Reservation("a", 5, is_resumable=False)
    for _ in range(8):
        engine.quotas.reserve(new)
    exchange = TenantExchange(0, 1, engine, cluster_of(1), table)
    await exchange.exchange(num_shards=4)
    assert Report.parse(table.reports[0]).usages["a"].claimed_live_requests == 8


async def test_a_shard_that_stays_alone_has_the_whole_limit_again() -> None:
    engine, table, new = Engine(), Table(), Reservation("a", 5, is_resumable=False)
    exchange = TenantExchange(0, 1, engine, cluster_of(1), table)
    table.is_away = True
    with pytest.raises(StoreUnavailable):
        await exchange.exchange(num_shards=4)
    assert engine.quotas.error(new, 0) is not None
    exchange.undivide()
    for _ in range(8):
        assert engine.quotas.error(new, 0) is None
        engine.quotas.reserve(new)
    assert engine.quotas.error(new, 0) is not None


async def test_shards_that_are_not_in_the_map_yet_count() -> None:
    engine, table, new = Engine(), Table(), Reservation("a", 5, is_resumable=False)
    exchange = TenantExchange(0, 1, engine, cluster_of(2), table)
    table.reports[3] = Report(7, [], {"a": Usage(live_requests=8, claimed_live_requests=8)}).pack()
    with engine.quotas.wanting([new]):
        await exchange.exchange()
    assert engine.quotas.error(new, 0) is not None
