"""The map of the cluster: how many shards there are, who should lead them, whose each worker is.

The leader of shard 0 writes it to Redis; every scheduler reads it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from scheduler_svc.cluster.spread import spread

# Each costs its leader, its standbys and every gateway connections and processor time at rest.
MAX_SHARDS = 128


@dataclass(frozen=True)
class ClusterMap:
    """One version of the map. `version` rises with every change."""

    version: int = 0
    num_shards: int = 1
    # By shard, the id of the scheduler that should lead it.
    owners: Mapping[int, str] = field(default_factory=dict)
    # By address of a worker, its shard.
    workers: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, packed: bytes) -> Self:
        """Read a packed map. ValueError for anything else."""
        try:
            read = json.loads(packed)
            found = cls(
                version=int(read["version"]),
                num_shards=int(read["num_shards"]),
                owners={int(shard): str(owner) for shard, owner in read["owners"].items()},
                workers={str(address): int(shard) for address, shard in read["workers"].items()},
            )
        except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(repr(error)) from error
        if not (found.version > 0 and 1 <= found.num_shards <= MAX_SHARDS):
            raise ValueError(f"version {found.version}, {found.num_shards} shards")
        return found

    def pack(self) -> bytes:
        """For Redis."""
        return json.dumps(vars(self), sort_keys=True, separators=(",", ":")).encode()

    def next(
        self,
        members: Iterable[str],
        workers: Iterable[str],
        num_shards: int | None = None,
        leaders: Mapping[int, str] | None = None,
        epochs: Mapping[int, int] | None = None,
    ) -> Self:
        """The map for these schedulers and workers: the same object if nothing changes. Shards stay
        with their `leaders`, those of this map if absent, as far as these are not too many. Of a
        scheduler with too many, those with the highest `epochs` get another one."""
        num_shards = max(self.num_shards, num_shards or 0)
        shards = [str(shard) for shard in range(num_shards)]
        present = self.owners if leaders is None else leaders
        owners = assign_owners(num_shards, members, present, epochs)
        of_workers = spread(
            workers, shards, {address: str(shard) for address, shard in self.workers.items()}
        )
        following = replace(
            self,
            num_shards=num_shards,
            owners=owners,
            workers={address: int(shard) for address, shard in of_workers.items()},
        )
        return self.changed_to(following)

    def changed_to(self, planned: Self, owners: Mapping[int, str] | None = None) -> Self:
        """The planned map, but these owners of their shards, as the next version: the same object
        if nothing changes."""
        following = replace(
            planned, version=self.version, owners={**planned.owners, **(owners or {})}
        )
        return self if following == self else replace(following, version=self.version + 1)


def assign_owners(
    num_shards: int,
    members: Iterable[str],
    previous: Mapping[int, str],
    epochs: Mapping[int, int] | None = None,
) -> dict[int, str]:
    """By shard, the scheduler that should lead it; empty without schedulers."""
    owners = spread(
        map(str, range(num_shards)),
        sorted(members),
        {str(shard): owner for shard, owner in previous.items()},
        {str(shard): epoch for shard, epoch in (epochs or {}).items()},
    )
    return {int(shard): owner for shard, owner in sorted(owners.items(), key=lambda x: int(x[0]))}
