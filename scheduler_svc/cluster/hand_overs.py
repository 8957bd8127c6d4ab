"""Limits planned hand-overs to one shard at a time: each pauses the streams of its shard."""

from collections.abc import Callable, Mapping, Sequence

from scheduler_svc.cluster.cluster_map import ClusterMap
from scheduler_svc.cluster.load import ShardLoad

# The next shard is handed over after this time, even if the last one does not serve yet: a gateway
# may have ended meanwhile.
MAX_HAND_OVER_S = 3.0


class HandOvers:
    """Hands shards over one after another.

    A shard without a live request pauses no stream, and one without a leader must have one at once:
    neither waits. A scheduler that has not taken a shard which it was given gets no other one with
    requests. What waits is not stored: the next coordinator finds it by its own plan. Shard 0 is
    the last, because the coordinator moves with it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # An earlier coordinator may have begun one just now.
        self._begun_at = clock()
        # The shard whose hand-over was begun last, with its load before.
        self._last: tuple[int, ShardLoad] | None = None

    def limit(
        self,
        present: ClusterMap,
        planned: ClusterMap,
        leading: Mapping[int, str],
        loads: Sequence[ShardLoad],
    ) -> ClusterMap:
        """The map that follows the present one: the planned one, with shards that have to wait left
        to the schedulers that lead them. `leading`: these, those that run, by shard."""
        # By shard, the scheduler that has to take it from another one that runs.
        given = {
            shard: owner
            for shard, owner in planned.owners.items()
            if leading.get(shard, owner) != owner
        }
        begun = {shard for shard, owner in given.items() if present.owners.get(shard) == owner}
        waiting = given.keys() - begun
        waiting -= {shard for shard in waiting if shard and not loads[shard].num_live}
        if not self._is_under_way(begun, loads):
            absent = {given[shard] for shard in begun}
            ready = [shard for shard in waiting if given[shard] not in absent]
            if ready:
                following = min(ready, key=lambda shard: (shard == 0, shard))
                waiting.remove(following)
                self._last = following, loads[following]
                self._begun_at = self._clock()
        return present.changed_to(planned, {shard: leading[shard] for shard in waiting})

    def _is_under_way(self, begun: set[int], loads: Sequence[ShardLoad]) -> bool:
        """Whether a shard that was given does not serve yet, and is waited for."""
        if self._clock() - self._begun_at >= MAX_HAND_OVER_S:
            return False
        return bool(begun) or (
            self._last is not None and not _serves(loads[self._last[0]], self._last[1])
        )


def _serves(load: ShardLoad, before: ShardLoad) -> bool:
    """Whether a shard has a worker and as many gateways as before its hand-over, as far as it had
    any."""
    return (
        bool(load.leader)
        and load.num_workers >= min(1, before.num_workers)
        and load.num_gateways >= before.num_gateways
    )
