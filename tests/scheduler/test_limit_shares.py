import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.limits import LimitShares, PrincipalLimits, Usage, rate_share_of, share_of
from scheduler_svc.core.quotas import Quotas, Reservation
from scheduler_svc.engine.tenant_exchange import Report, TenantExchange


@given(st.integers(0, 50), st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_shares_add_up_to_the_limit(limit: int, used: list[int]) -> None:
    shares = [share_of(limit, used, shard) for shard in range(len(used))]
    assert sum(shares) == max(limit, sum(used))
    assert all(share >= mine for share, mine in zip(shares, used, strict=True))
    spare = [share - mine for share, mine in zip(shares, used, strict=True)]
    assert max(spare) - min(spare) <= 1


def test_a_single_shard_has_the_whole_limit() -> None:
    limits = PrincipalLimits(live_requests=3, tokens_per_minute=7)
    assert LimitShares().of("a", limits) == limits


def test_a_share_follows_what_is_used() -> None:
    shares = LimitShares()
    shares.update(1, [{}, {}, {}, {}])
    limits = PrincipalLimits(live_requests=10, requests_per_minute=2)
    # Of a rate each shard has at least one.
    assert shares.of("a", limits) == PrincipalLimits(live_requests=3, requests_per_minute=1)
    shares.update(1, [{"a": Usage(live_requests=2)}, {"a": Usage(live_requests=6)}])
    assert shares.of("a", limits).live_requests == 7
    assert shares.of("b", limits).live_requests == 5


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
    quotas.divide(0, [{}, {}])
    new = Reservation("a", 5, is_resumable=False)
    for _ in range(2):
        assert quotas.error(new, 0) is None
        quotas.reserve(new)
    error = quotas.error(new, 0)
    assert error is not None
    assert "4 live requests" in error.message
    report = quotas.report(1.0, lambda principal: 7)["a"]
    assert (report.live_requests, report.waiting_tokens) == (2, 17)
    assert report.requests_per_minute > 0
    # The other shard uses nothing, and gets half of what is left.
    quotas.divide(0, [{"a": report}, {}])
    assert quotas.error(new, 0) is None


@pytest.mark.parametrize("packed", [b"", b"{}", b"[1]", b'[1, {"a": [1, 2, 3, 4, 5, 6, 7]}]'])
def test_an_unreadable_report_is_empty(packed: bytes) -> None:
    assert Report.parse(packed) == Report()


def test_a_report_is_what_was_packed() -> None:
    report = Report(7, {"a": Usage(1, 2, 3, 4, 5, 6.5)})
    assert Report.parse(report.pack()) == report


class Table:
    """The reports of all shards, in place of Redis."""

    def __init__(self) -> None:
        self.reports: dict[int, bytes] = {}

    async def exchange(self, shard: int, report: bytes) -> dict[int, bytes]:
        self.reports[shard] = report
        return dict(self.reports)


class Shares:
    """The counters of an engine, without the engine."""

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
    cluster = SimpleNamespace(map=SimpleNamespace(num_shards=2))
    exchanges = [TenantExchange(shard, 1, engines[shard], cluster, table) for shard in (0, 1)]
    new = Reservation("a", 5, is_resumable=False)
    for _ in range(5):
        engines[0].quotas.reserve(new)
    for _ in range(2):
        await asyncio.gather(*(exchange.exchange() for exchange in exchanges))
    # Of eight, five are used; the three that are left are divided.
    assert [engine.quotas._usage["a"].shares.live_requests for engine in engines] == [7, 1]
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


async def test_a_new_leader_takes_its_share_at_once() -> None:
    engine = Engine()
    cluster = SimpleNamespace(map=SimpleNamespace(num_shards=2))
    running = asyncio.create_task(TenantExchange(1, 1, engine, cluster, Table()).run())
    await asyncio.sleep(0)
    assert engine.quotas._usage["a"].shares.live_requests == 4
    running.cancel()
