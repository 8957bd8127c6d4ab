"""What the pools in Redis say of their blocks, read behind the services' backs."""

import struct

import redis

from scheduler_svc.store.keys import PoolKeys, ShardKeys

KEYS = ShardKeys(0)


class PoolWatch:
    """All pools of one Redis."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    @property
    def num_held(self) -> int:
        """Blocks that have references."""
        return sum(self._held(keys) for keys in self._pools())

    @property
    def is_conserved(self) -> bool:
        """In every pool free and held blocks are all its blocks but the null block."""
        return all(self._is_conserved(keys) for keys in self._pools())

    @property
    def num_pools(self) -> int:
        return len(self._pools())

    @property
    def steps(self) -> dict[int, int]:
        """The last step that each pool's worker was given, by incarnation."""
        states = {keys.incarnation: self._client.hget(keys.state, "step") for keys in self._pools()}
        return {incarnation: int(step or 0) for incarnation, step in states.items()}

    def live_requests(self) -> list[bytes]:
        """Request keys without a time to live."""
        keys = self._client.keys("quire:{shard:0}:request:*")
        return [key for key in keys if self._client.ttl(key) == -1]

    def _pools(self) -> list[PoolKeys]:
        return [KEYS.pool(int(incarnation)) for incarnation in self._client.smembers(KEYS.pools)]

    def _held(self, keys: PoolKeys) -> int:
        references = self._client.get(keys.references) or b""
        return sum(1 for count in struct.unpack(f">{len(references) // 4}I", references) if count)

    def _is_conserved(self, keys: PoolKeys) -> bool:
        state = self._client.hgetall(keys.state)
        if not state:
            return True
        num_blocks, fresh = int(state[b"num_blocks"]), int(state[b"fresh"])
        num_free = self._client.zcard(keys.free) + num_blocks - fresh
        return num_free + self._held(keys) == num_blocks - 1
