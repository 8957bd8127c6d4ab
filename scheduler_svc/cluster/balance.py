"""How many waiting requests a shard gives to others. Pure."""

from collections.abc import Sequence

from scheduler_svc.cluster.load import ShardLoad


def moves(shard: int, num_waiting: int, loads: Sequence[ShardLoad]) -> dict[int, int]:
    """By shard, how many of `num_waiting` requests of this one it should get.

    Only shards with free rows and without a queue get any. Shards with queues share these rows in
    proportion to their queues, each at least one, so that all of them together give at most one
    more each than there are.
    """
    total = max(sum(load.num_waiting for load in loads), num_waiting)
    given: dict[int, int] = {}
    left = num_waiting
    for other, load in enumerate(loads):
        has_room = load.leader and load.num_workers and not load.num_waiting and load.num_free_rows
        if other == shard or not has_room or not left:
            continue
        count = min(left, max(1, load.num_free_rows * num_waiting // total))
        given[other] = count
        left -= count
    return given


def moves_without_workers(
    shard: int, num_waiting: int, loads: Sequence[ShardLoad]
) -> dict[int, int]:
    """As `moves`, of a shard that has had no worker for a while: its requests wait in other shards
    with workers, in parts that are about equal, if they cannot run there at once."""
    others = [
        other
        for other, load in enumerate(loads)
        if other != shard and load.leader and load.num_workers
    ]
    # The shortest queues are first.
    others.sort(key=lambda other: loads[other].num_waiting)
    counts = [
        num_waiting // len(others) + (at < num_waiting % len(others)) for at in range(len(others))
    ]
    return {other: count for other, count in zip(others, counts, strict=True) if count}
