"""What a load asks of a server, whatever it speaks."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

from quire.bench.workload import BenchRequest


class RequestFailed(Exception):
    """A request that did not come to its end. The message is short, and the same for all requests
    that failed for the same reason."""


@dataclass(frozen=True, slots=True)
class Message:
    """A part of a stream."""

    # Tokens that it brought.
    count: int
    token_ids: list[int] = field(default_factory=list)
    # All of the request's tokens, as the server counted them, where it says so.
    num_counted_tokens: int | None = None


class Server(Protocol):
    """Streams outputs."""

    @property
    def name(self) -> str:
        """What reports call it."""
        ...

    def stream(self, request: BenchRequest) -> AsyncGenerator[Message, None]:
        """A request's output as it is written. RequestFailed if it does not come to its end."""
        ...

    async def close(self) -> None: ...
