"""The interface of servers under load, independent of their protocol."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

from quire.bench.workload import BenchRequest
from quire.client.decode_counts import DecodeCounts


class RequestFailed(Exception):
    """A request did not complete. The message is short, and equal for equal causes."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a stream."""

    # Number of tokens in the message.
    count: int
    token_ids: list[int] = field(default_factory=list)
    # The server's count of all output tokens, in the last message.
    num_counted_tokens: int | None = None


class Server(Protocol):
    """Streams outputs."""

    @property
    def name(self) -> str:
        """The server's name in reports."""
        ...

    def stream(self, request: BenchRequest) -> AsyncGenerator[Message, None]:
        """Stream a request's output. RequestFailed if it does not complete."""
        ...

    async def decode_counts(self) -> DecodeCounts | None:
        """What the server's workers have decoded so far; None if that is not known."""
        ...

    async def close(self) -> None: ...
