"""What the scheduler says about one request, waiting for the call that answers the client."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from quire.internal.v1 import scheduler_pb2
from quire.service.errors import RequestError, failed


@dataclass(frozen=True)
class Accepted:
    """The scheduler has the request."""


@dataclass(frozen=True)
class NewTokens:
    choice: int
    first_index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Ended:
    choice: int
    reason: scheduler_pb2.EndReason.ValueType
    # The stop token, where the reason is one.
    stop_token_id: int | None
    num_tokens: int
    num_cached_prompt_tokens: int


Event = Accepted | NewTokens | Ended


class RequestStream:
    """A queue of the events of all choices of a request, bounded by their tokens together.

    One that fills, or one that fails, gives an error and nothing more.
    """

    def __init__(
        self,
        attachment: int,
        num_choices: int,
        max_queued_tokens: int,
        on_overflow: Callable[[], object],
    ) -> None:
        self.attachment = attachment
        self.error: RequestError | None = None
        # The choices whose end the scheduler has not told yet.
        self._live_choices = set(range(num_choices))
        self._max_queued_tokens = max_queued_tokens
        self._on_overflow = on_overflow
        self._events: list[Event] = []
        self._num_queued_tokens = 0
        self._changed = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """The scheduler has told every choice's end."""
        return not self._live_choices

    def is_live(self, choice: int) -> bool:
        return choice in self._live_choices

    def put(self, event: Event) -> None:
        """A choice's first end wins: what comes behind it is dropped."""
        if isinstance(event, NewTokens | Ended) and not self.is_live(event.choice):
            return
        if isinstance(event, Ended):
            self._live_choices.remove(event.choice)
        if self.error is None:
            self._queue(event)

    def fail(self, error: RequestError) -> None:
        """What was put before is still taken."""
        self.error = self.error or error
        self._changed.set()

    async def take(self) -> list[Event]:
        """Everything that waits, at least one event; RequestError once there is only that."""
        await self._changed.wait()
        if not self._events and self.error is not None:
            raise self.error
        events, self._events = self._events, []
        self._num_queued_tokens = 0
        if self.error is None:
            self._changed.clear()
        return events

    def _queue(self, event: Event) -> None:
        if isinstance(event, NewTokens):
            self._num_queued_tokens += len(event.token_ids)
            if self._num_queued_tokens > self._max_queued_tokens:
                self._overflow()
                return
        self._events.append(event)
        self._changed.set()

    def _overflow(self) -> None:
        self._events.clear()
        self.fail(
            failed(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "SLOW_READER",
                f"more than {self._max_queued_tokens} tokens waited for the client to read them",
            )
        )
        self._on_overflow()
