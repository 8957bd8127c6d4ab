"""The right to write."""

import secrets
from dataclasses import dataclass
from typing import Self

from scheduler_svc.store.connection import Connection
from scheduler_svc.store.keys import LEADERSHIP
from scheduler_svc.store.scripts import RAISE_EPOCH


@dataclass(frozen=True, slots=True)
class Leadership:
    """A fencing number and its holder's random id; every writing script demands both."""

    epoch: int
    holder: bytes  # 16 bytes

    @classmethod
    async def take(cls, connection: Connection) -> Self:
        """Raises the epoch: from here on every former leader's calls are refused."""
        holder = secrets.token_bytes(16)
        epoch = await connection.run(RAISE_EPOCH, (LEADERSHIP,), (holder,))
        return cls(int(epoch), holder)
