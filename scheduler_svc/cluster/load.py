"""How much work a shard has, as its leader writes it for the others."""

import json
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class ShardLoad:
    """The load of one shard."""

    # Where its leader is; empty if unknown.
    leader: str = ""
    # Workers that take requests, and the rows that they have left.
    num_workers: int = 0
    num_free_rows: int = 0
    # Sequences of live requests, and those of them that wait for a worker.
    num_live: int = 0
    num_waiting: int = 0

    @classmethod
    def parse(cls, packed: bytes) -> Self:
        """Read a packed load. ValueError for anything else."""
        return cls(*json.loads(packed))

    def pack(self) -> bytes:
        """For Redis."""
        fields = (self.leader, self.num_workers, self.num_free_rows, self.num_live)
        return json.dumps([*fields, self.num_waiting]).encode()
