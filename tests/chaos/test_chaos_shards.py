"""Runs with several shards: which faults they have, which shards a fault hits, what is reported."""

from pathlib import Path

import pytest

from benchmarks.chaos.__main__ import main, plan_of
from benchmarks.chaos.comparison import Verdict
from benchmarks.chaos.experiment import SHARDS_RAISED, Outcome, Recovered
from benchmarks.chaos.gaps import ByShard
from benchmarks.chaos.joined import joined, save
from benchmarks.chaos.redis_servers import (
    SingleRedis,
    live_records,
    record_key,
    shards_of_requests,
)
from benchmarks.chaos.tables import part_of_run
from benchmarks.cluster_view import ClusterView, Shard
from quire.launcher.redis import EmbeddedRedis

_VIEW = ClusterView(
    [
        Shard("unix:one", ("unix:a", "unix:b"), 2),
        Shard("unix:two", ("unix:c",), 1),
        Shard("unix:one", ("unix:d",), 1),
    ],
    ["unix:one", "unix:two"],
)
_SHARDS = ["--gateways=2", "--schedulers=3", "--workers=4", "--shards=4"]


def names_of(arguments: list[str]) -> set[str]:
    return {fault.name for fault in plan_of(arguments).faults}


def test_a_shard_is_of_its_leader_and_of_its_workers() -> None:
    assert _VIEW.leaders == {"unix:one", "unix:two"}
    assert _VIEW.led_by("unix:one") == {0, 2}
    assert _VIEW.led_by("unix:three") == frozenset()
    assert _VIEW.with_worker("unix:c") == {1}
    assert _VIEW.every == {0, 1, 2}


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ((3, 4, 3), "2 of 3 schedulers are known"),
        ((3, 4, 2), None),
        ((4, 4, 2), "there are 3 of 4 shards"),
        ((3, 5, 2), "the leaders have 4 of 5 workers"),
    ],
)
def test_what_a_view_lacks_is_named(sizes: tuple[int, int, int], problem: str | None) -> None:
    assert _VIEW.find_problem(*sizes) == problem


def test_shards_are_led_evenly() -> None:
    shards = [Shard("unix:one"), Shard("unix:one"), Shard("unix:two")]
    even = ClusterView(shards, ["unix:one", "unix:two"])
    uneven = ClusterView(shards, ["unix:one", "unix:two", "unix:three"])
    assert even.find_problem(3, 0, 2) is None
    assert uneven.find_problem(3, 0, 3) == "the schedulers lead [2, 1, 0] shards"


def test_workers_that_are_not_there_are_missed() -> None:
    view = ClusterView([Shard("unix:one", ("unix:a", "unix:b"), 1)], ["unix:one"])
    assert view.find_problem(1, 2, 1) == "shard 0 has 1 of 2 workers"


def test_a_shard_without_a_leader_is_a_problem() -> None:
    assert ClusterView([Shard("")]).find_problem(1, 0, 1) == "shard 0 has no leader"


@pytest.mark.parametrize(
    ("owners", "move"),
    [
        (["unix:one", "unix:two", "unix:one"], None),
        (["unix:one", "unix:one", "unix:two"], "shard 1 is led by unix:two, not by unix:one"),
        (["unix:one", "", "unix:one"], "shard 1 is led by unix:two, not by any"),
        ([], "the map has 0 of 3 shards"),
    ],
)
def test_shards_that_others_should_lead_will_move(owners: list[str], move: str | None) -> None:
    assert _VIEW.find_move(owners) == move


def test_faults_of_several_leaders_need_several_shards() -> None:
    assert names_of(_SHARDS) - names_of([]) == {"leaders-killed"}
    assert "leaders-killed" in names_of(["--raise-shards-to=2"])
    assert {"worker-leader-killed", "gateway-redis-killed"} < names_of([])


def test_a_primary_is_killed_where_there_is_a_cluster() -> None:
    assert names_of(["--redis=cluster"]) - names_of([]) == {"redis-primary-killed"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("leaders-killed",), "leaders-killed: needs --shards or --raise-shards-to"),
        (("redis-primary-killed",), "redis-primary-killed: needs --redis cluster"),
        (("--gateways=1",), "at least 2"),
        (("--shards=4", "--raise-shards-to=4"), "more than --shards"),
    ],
)
def test_senseless_runs_are_refused(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert words in capsys.readouterr().err


def test_a_stream_counts_as_hit_if_one_of_its_shards_was() -> None:
    pauses = ByShard()
    pauses.add(0.5, frozenset({1}), frozenset({0, 1}))
    pauses.add(0.1, frozenset({2}), frozenset({0, 1}))
    # It has moved.
    pauses.add(0.4, frozenset({1, 2}), frozenset({0, 1}))
    # No shard has its record.
    pauses.add(0.2, frozenset(), frozenset({0, 1}))
    assert pauses == ByShard([0.5, 0.4], [0.1, 0.2])


def test_gaps_of_hit_shards_are_reported_apart_from_the_others() -> None:
    plan = plan_of([*_SHARDS, "leader-killed", "gateway-killed"])
    outcome = Outcome(
        baseline=[0.05, 0.1],
        pauses={"leader-killed": [0.1, 0.6], "gateway-killed": [0.3]},
        recoveries={"leader-killed": [2.0], "gateway-killed": [2.0]},
        by_shard={"leader-killed": ByShard([0.6], [0.1])},
    )
    part = part_of_run(plan, outcome)
    leader, gateway = part.rows
    assert part.name == "shards"
    assert (leader["hit"], leader["hit_p99_s"], leader["others_max_s"]) == (1, 0.6, 0.1)
    assert (gateway["hit"], gateway["others"], gateway["others_p99_s"]) == (0, 1, 0.3)
    assert "Three schedulers, four workers, two gateways and Redis" in part.notes[0]
    aims = {target.what: target.met for target in part.targets if "leading" in target.what}
    assert list(aims.values()) == [True, True]


def test_raising_the_number_of_shards_is_a_row_of_its_own() -> None:
    plan = plan_of(["--times=0", "--raise-shards-to=4"])
    outcome = Outcome(pauses={SHARDS_RAISED: [0.1]}, recoveries={SHARDS_RAISED: [3.0]})
    [row] = part_of_run(plan, outcome).rows
    assert (row["fault"], row["times"], row["others_max_s"]) == ("1 to 4 shards", 1, 0.1)


def test_runs_are_added_up(tmp_path: Path) -> None:
    one = Outcome(
        baseline=[0.1],
        pauses={"leader-killed": [0.5]},
        recoveries={"leader-killed": [2.0]},
        by_shard={"leader-killed": ByShard([0.5], [])},
        recovered={"leader-killed": Recovered(10, 5)},
        num_requests=3,
        num_wrong={Verdict.LOST: 1, Verdict.FAILED: 0},
        violations=["why"],
    )
    save(one, tmp_path)
    assert joined(Outcome(), [tmp_path]) == one
    both = joined(one, [tmp_path])
    assert both.by_shard == {"leader-killed": ByShard([0.5, 0.5], [])}
    assert both.recovered == {"leader-killed": Recovered(20, 10)}
    assert (both.num_requests, both.num_wrong[Verdict.LOST]) == (6, 2)
    assert one.pauses == {"leader-killed": [0.5]}


def test_the_shards_of_requests_are_read_from_their_records(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis") as server:
        servers = SingleRedis(server)
        with servers.client() as client:
            client.set(record_key(0, "a"), "")
            client.set(record_key(2, "a"), "")
            client.set(record_key(1, "b/c"), "")
            client.set("quire:{shard:1}:request:/b:record", "", px=60_000)
        found = shards_of_requests(servers, ["a", "b/c", "d"], 3)
        assert found == {"a": {0, 2}, "b/c": {1}, "d": frozenset()}
        assert len(live_records(servers)) == 3
