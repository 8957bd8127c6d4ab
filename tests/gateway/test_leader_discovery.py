"""The search for a leader, among addresses of which a test says what is there."""

import asyncio
from collections import Counter

import pytest
from structlog.testing import capture_logs
from waiting import until

from gateway_svc.scheduler import leader_discovery
from gateway_svc.scheduler.leader_discovery import LeaderDiscovery
from gateway_svc.scheduler.leader_stream import HandshakeFailedError, LeaderStream, NotLeadingError

ONE, TWO, OTHER = "unix:/one", "unix:/two", "unix:/other"


class Schedulers:
    """What is at each address: a leader, a standby, or one that hangs."""

    def __init__(self, leader: str, *hanging: str) -> None:
        self.leader = leader
        self.hanging = hanging
        self.tries: Counter[str] = Counter()
        self.order: list[str] = []
        self.discovery = LeaderDiscovery([ONE, TWO], self.connect)

    async def connect(self, address: str) -> LeaderStream:
        self.tries[address] += 1
        self.order.append(address)
        if address in self.hanging:
            await asyncio.Event().wait()
        if address != self.leader:
            raise NotLeadingError("a standby")
        return LeaderStream(address)

    async def find(self) -> str:
        return (await asyncio.wait_for(self.discovery.find(), 10)).address


async def test_a_certificate_that_is_not_valid_is_a_warning() -> None:
    async def connect(address: str) -> LeaderStream:
        if address == TWO:
            return LeaderStream(address)
        raise HandshakeFailedError("certificate has expired")

    discovery = LeaderDiscovery([TWO], connect)
    discovery.suggest(ONE)
    with capture_logs() as logs:
        assert (await asyncio.wait_for(discovery.find(), 10)).address == TWO
    assert {"address": ONE, "reason": "certificate has expired"}.items() <= logs[0].items()
    assert (logs[0]["event"], logs[0]["log_level"]) == ("TLS with a scheduler fails", "warning")


async def test_reasons_that_alternate_are_logged_once() -> None:
    """As of a scheduler that does not lead and sometimes does not respond in time."""
    reasons = iter(["it does not lead", "no hello within 1.0 s"] * 3)

    async def connect(address: str) -> LeaderStream:
        reason = next(reasons, None)
        if reason is None:
            return LeaderStream(address)
        raise NotLeadingError(reason)

    with capture_logs() as logs:
        await asyncio.wait_for(LeaderDiscovery([ONE], connect).find(), 10)
    assert [one["reason"] for one in logs] == ["it does not lead", "no hello within 1.0 s"]


async def test_a_suggested_leader_is_tried_alone() -> None:
    schedulers = Schedulers(OTHER)
    schedulers.discovery.suggest(OTHER)
    assert await schedulers.find() == OTHER
    assert schedulers.order == [OTHER]


@pytest.mark.parametrize("hanging", [(), (OTHER,)])
async def test_other_addresses_are_tried_if_the_suggested_one_does_not_lead(
    hanging: tuple[str, ...],
) -> None:
    schedulers = Schedulers(TWO, *hanging)
    schedulers.discovery.suggest(OTHER)
    assert await schedulers.find() == TWO
    assert schedulers.order[0] == OTHER


async def test_a_standby_that_fails_at_once_costs_no_head_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leader_discovery, "_HEAD_START_S", 3600)
    schedulers = Schedulers(TWO)
    schedulers.discovery.suggest(ONE)
    assert await schedulers.find() == TWO


async def test_an_address_that_is_suggested_during_the_search_is_tried_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in its back-off."""
    monkeypatch.setattr(leader_discovery, "_FIRST_BACKOFF_S", 3600)
    for suggested in (OTHER, ONE):
        schedulers = Schedulers("")
        finding = asyncio.create_task(schedulers.find())
        await until(lambda at=schedulers: {ONE, TWO} <= {*at.tries}, "the first tries")
        schedulers.leader = suggested
        schedulers.discovery.suggest(suggested)
        assert await finding == suggested
        # The same suggestion again has no effect, or a wrong one would be tried without a pause.
        schedulers.leader = ""
        before = schedulers.tries[suggested]
        finding = asyncio.create_task(schedulers.find())
        await until(lambda at=schedulers, n=before, a=suggested: at.tries[a] > n, "a try")
        for _ in range(10):
            schedulers.discovery.suggest(suggested)
            await asyncio.sleep(0)
        assert schedulers.tries[suggested] == before + 1
        finding.cancel()
        await asyncio.gather(finding, return_exceptions=True)


async def test_schedulers_that_name_each_other_cause_no_busy_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leader_discovery, "_FIRST_BACKOFF_S", 3600)
    monkeypatch.setattr(leader_discovery, "_MAX_BACKOFF_S", 3600)
    schedulers = Schedulers("")
    finding = asyncio.create_task(schedulers.find())
    for _ in range(100):
        schedulers.discovery.suggest(ONE)
        await asyncio.sleep(0)
        schedulers.discovery.suggest(TWO)
        await asyncio.sleep(0)
    tries = 1 + leader_discovery._MAX_HURRIED
    await until(lambda: schedulers.tries.total() >= 2 * tries, "all tries")
    finding.cancel()
    await asyncio.gather(finding, return_exceptions=True)
    assert schedulers.tries == {ONE: tries, TWO: tries}


async def test_an_address_that_is_not_valid_is_ignored() -> None:
    schedulers = Schedulers(ONE)
    schedulers.discovery.suggest("nonsense")
    assert await schedulers.find() == ONE
    assert "nonsense" not in schedulers.tries
