import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.cluster.cluster_map import ClusterMap
from scheduler_svc.cluster.spread import spread, weight

NAMES = st.sets(st.text("abcdefgh", min_size=1, max_size=3), max_size=20)


def is_even(placed: dict[str, str], bins: list[str]) -> bool:
    counts = Counter(placed.values())
    sizes = [counts[name] for name in bins]
    return max(sizes) - min(sizes) <= 1


@given(NAMES, NAMES.filter(bool), st.data())
def test_items_are_spread_evenly_and_as_few_as_possible_move(items, bins, data) -> None:
    ordered = sorted(bins)
    previous = data.draw(
        st.dictionaries(
            st.sampled_from(sorted(items)) if items else st.nothing(),
            st.sampled_from([*ordered, "gone"]),
        )
    )
    placed = spread(items, ordered, previous)
    assert placed.keys() == items
    assert is_even(placed, ordered)
    # The order of the bins and of the items is of no importance.
    assert placed == spread(sorted(items, reverse=True), ordered[::-1], previous)
    # As many stay as fit into even bins: all of a bin, up to the size that the bin may have.
    stay = sum(placed[item] == previous.get(item) for item in items)
    sizes = Counter(previous[item] for item in items if previous.get(item) in bins)
    least, num_larger = divmod(len(items), len(ordered))
    fitting = sum(min(sizes[name], least) for name in ordered)
    fitting += min(num_larger, sum(sizes[name] > least for name in ordered))
    assert stay == fitting


@given(NAMES, NAMES.filter(bool), st.data())
def test_those_that_came_last_into_a_bin_move(items, bins, data) -> None:
    ordered = sorted(bins)
    previous = {item: data.draw(st.sampled_from(ordered)) for item in sorted(items)}
    arrivals = {item: data.draw(st.integers(0, 5)) for item in sorted(items)}
    placed = spread(items, ordered, previous, arrivals)
    assert is_even(placed, ordered)
    for name in ordered:
        held = [item for item in items if previous[item] == name]
        moved = [arrivals[item] for item in held if placed[item] != name]
        kept = [arrivals[item] for item in held if placed[item] == name]
        assert not moved or not kept or min(moved) >= max(kept)
    # As many move as without arrivals.
    num_moved = sum(placed[item] != previous[item] for item in items)
    without = spread(items, ordered, previous)
    assert num_moved == sum(without[item] != previous[item] for item in items)


def test_of_two_full_bins_the_one_that_was_filled_last_gives() -> None:
    for first, last in ("ab", "ba"):
        previous = {"0": first, "1": first, "2": last, "3": last}
        arrivals = {"0": 1, "1": 2, "2": 1, "3": 3}
        assert spread("0123", "abc", previous, arrivals) == {**previous, "3": "c"}


def test_the_cost_of_spreading_grows_with_items_times_bins(monkeypatch) -> None:
    """The leader of shard 0 spreads hundreds of workers over new shards within a heartbeat."""
    num_weights = 0

    def counted(item: str, name: str) -> int:
        nonlocal num_weights
        num_weights += 1
        return weight(item, name)

    monkeypatch.setattr("scheduler_svc.cluster.spread.weight", counted)
    items, bins = ([str(number) for number in range(count)] for count in (300, 60))
    placed = spread(items, bins, dict.fromkeys(items, bins[0]))
    assert is_even(placed, bins)
    assert num_weights < 3 * len(items) * len(bins)


def test_without_bins_nothing_is_placed() -> None:
    assert spread(["a"], [], {}) == {}


@given(NAMES.filter(bool), st.integers(1, 6), NAMES.filter(bool), st.integers(1, 6))
def test_a_map_follows_what_changes(members, num_shards, workers, more) -> None:
    first = ClusterMap().next(members, workers, num_shards)
    assert first.version == 1
    assert first.next(members, workers) is first
    assert first.owners.keys() == set(range(num_shards))
    assert set(first.owners.values()) <= members
    assert first.workers.keys() == workers
    assert ClusterMap.parse(first.pack()) == first
    raised = first.next(members, workers, num_shards + more)
    assert (raised.version, raised.num_shards) == (2, num_shards + more)
    assert raised.next(members, workers, 1) is raised, "the number of shards never falls"


def test_shards_stay_with_those_who_lead_them() -> None:
    present = ClusterMap(1, 2, {0: "a", 1: "b"})
    assert present.next(["a", "b"], [], leaders={0: "b", 1: "a"}).owners == {0: "b", 1: "a"}
    # One that returns gets one of the two back.
    alone = present.next(["a"], [])
    assert alone.owners == {0: "a", 1: "a"}
    assert sorted(alone.next(["a", "b"], []).owners.values()) == ["a", "b"]


def test_schedulers_that_return_get_what_was_taken_over() -> None:
    """Of three schedulers two end and return; the third one keeps its own shards."""
    owners = {0: "a", 1: "a", 2: "b", 3: "c"}
    epochs = {0: 10, 1: 11, 2: 12, 3: 13}
    for survivor in "abc":
        left = ClusterMap(1, 4, owners).next([survivor], [], epochs=epochs)
        taken = {shard for shard, owner in owners.items() if owner != survivor}
        later = epochs | {shard: 100 + shard for shard in taken}
        back = left.next([survivor, "x", "y"], [], epochs=later)
        assert {shard for shard in owners if back.owners[shard] != survivor} <= taken


def test_a_worker_that_comes_moves_no_other() -> None:
    workers = [f"10.0.0.{number}:50053" for number in range(8)]
    present = ClusterMap().next(["a"], workers, 4)
    following = present.next(["a"], [*workers, "10.0.0.9:50053"])
    assert all(following.workers[address] == present.workers[address] for address in workers)
    # Two of its shard's three would leave no other choice but to move one.
    gone = [address for address, shard in present.workers.items() if shard == 0]
    left = present.next(["a"], set(workers) - set(gone))
    moved = [a for a, shard in left.workers.items() if present.workers[a] != shard]
    assert len(moved) == 1


@pytest.mark.parametrize("packed", [b"", b"[]", b"{}", b'{"version": "x"}', json.dumps(1).encode()])
def test_an_unreadable_map_is_an_error(packed: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        ClusterMap.parse(packed)
