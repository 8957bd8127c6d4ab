"""What the scheduler says about one request, waiting for the call that answers the client."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import structlog
from google.protobuf.message import DecodeError

from gateway_svc.logprobs import TokenLogprobs
from quire.internal.v1 import gateway_pb2, scheduler_pb2
from quire.service.errors import RequestError, failed

log = structlog.get_logger()

Wanted = scheduler_pb2.Submission | scheduler_pb2.Attachment


@dataclass(frozen=True)
class Accepted:
    """The scheduler has the request."""


@dataclass(frozen=True)
class NewTokens:
    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    # One per token, where they were asked for.
    logprobs: tuple[TokenLogprobs, ...] = ()


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
    """A queue of the events of all choices of a request: each token once, in order, bounded by
    the tokens of all choices together.

    It outlives the link: what it has is known, so that it can be asked for again from there on.
    One that fills, or one that fails, gives an error and nothing more.
    """

    def __init__(
        self,
        wanted: Wanted,
        state: gateway_pb2.StreamState | None,
        max_queued_tokens: int,
        on_overflow: Callable[[], object],
    ) -> None:
        """`state` is None for a request of another gateway, until the scheduler gives it back."""
        self.wanted = wanted
        self.state: gateway_pb2.StreamState | None = None
        self.error: RequestError | None = None
        # The scheduler has been asked for it, on this link or a former one.
        self.was_sent = False
        self.was_accepted = False
        # Tokens that a choice keeps, by choices that ended here at a stop string.
        self.finishes: dict[int, int] = {}
        # How often tokens were missing since the latest that came.
        self.num_gaps = 0
        # Its answer is given when all of it is there.
        self.is_patient = isinstance(wanted, scheduler_pb2.Submission) and wanted.patient
        # By choice, the next index to come.
        self._next_indices: list[int] = []
        # The choices whose end the scheduler has not told yet.
        self._live_choices: set[int] = set()
        self._max_queued_tokens = max_queued_tokens
        self._on_overflow = on_overflow
        self._events: list[Event] = []
        # Those that wait in `events`, and those of them that the bound counts.
        self._num_waiting_tokens = 0
        self._num_queued_tokens = 0
        # Tokens that somebody waits for; 0 is anything.
        self._at_least = 0
        self._due = asyncio.Event()
        self._waiting: asyncio.TimerHandle | None = None
        if state is not None:
            self._begin(state)

    @property
    def attachment(self) -> int:
        return self.wanted.attachment

    @property
    def has_ended(self) -> bool:
        """The scheduler has told every choice's end."""
        return self.state is not None and not self._live_choices

    @property
    def next_indices(self) -> list[int]:
        return list(self._next_indices)

    def is_live(self, choice: int) -> bool:
        return choice in self._live_choices

    def wait(self, wait_s: float, give_up: Callable[[], object]) -> None:
        """Gives up unless something comes in time; one that waits already goes on waiting."""
        if self._waiting is None and self.error is None:
            self._waiting = asyncio.get_running_loop().call_later(wait_s, give_up)

    def wait_no_more(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def accept(self, acceptance: scheduler_pb2.Acceptance) -> None:
        """Takes what the gateway that submitted it gave along, and what it is to be asked for with
        again."""
        self.wait_no_more()
        self.wanted.turn.CopyFrom(acceptance.turn)
        if self.was_accepted:
            return
        self.was_accepted = True
        if self.state is None:
            try:
                self._begin(gateway_pb2.StreamState.FromString(acceptance.opaque))
            except DecodeError:
                log.exception("the state of a request cannot be read")
                self.fail(RequestError(grpc.StatusCode.INTERNAL, "internal error"))
                return
        if self.error is None:
            self._queue(Accepted())

    def put(self, event: NewTokens | Ended, is_replayed: bool = False) -> bool:
        """False, and without effect, where tokens are missing before it.

        What is known already is dropped. A choice's first end wins: what comes behind it is
        dropped, too. The bound does not count what `is_replayed`: the scheduler has it at once. Nor
        does it count what is patient, which waits for no client to read it.
        """
        self.wait_no_more()
        if not self.is_live(event.choice):
            return True
        next_index = self._next_indices[event.choice]
        if isinstance(event, Ended):
            if event.num_tokens > next_index:
                return False
            self._live_choices.remove(event.choice)
            if self.error is None:
                self._queue(event)
            return True
        if event.first_index > next_index:
            return False
        known = next_index - event.first_index
        if new := event.token_ids[known:]:
            self._next_indices[event.choice] += len(new)
            self.num_gaps = 0
            tokens = NewTokens(event.choice, next_index, new, event.logprobs[known:])
            self._put_tokens(tokens, is_replayed)
        return True

    def fail(self, error: RequestError) -> None:
        """What was put before is still taken."""
        self.wait_no_more()
        self.error = self.error or error
        self._due.set()

    async def take(self, at_least: int = 0) -> list[Event]:
        """Everything that waits, at least one event; RequestError once there is only that.

        With `at_least` not before so many tokens wait, or every choice's end does.
        """
        self._at_least = at_least
        self._due.clear()
        self._tell_if_due()
        await self._due.wait()
        if not self._events and self.error is not None:
            raise self.error
        events, self._events = self._events, []
        self._num_waiting_tokens = self._num_queued_tokens = 0
        return events

    def _begin(self, state: gateway_pb2.StreamState) -> None:
        self.state = state
        self._next_indices = [0] * state.num_choices
        self._live_choices = set(range(state.num_choices))

    def _put_tokens(self, new: NewTokens, is_replayed: bool) -> None:
        if self.error is not None:
            return
        self._num_waiting_tokens += len(new.token_ids)
        if not (is_replayed or self.is_patient):
            self._num_queued_tokens += len(new.token_ids)
        if self._num_queued_tokens > self._max_queued_tokens:
            self._overflow()
        else:
            self._queue(new)

    def _queue(self, event: Event) -> None:
        self._events.append(event)
        self._tell_if_due()

    def _tell_if_due(self) -> None:
        if self.error is not None or (self._events and self._is_due):
            self._due.set()

    @property
    def _is_due(self) -> bool:
        return self._num_waiting_tokens >= self._at_least or self.has_ended

    def _overflow(self) -> None:
        self._events.clear()
        self.fail(
            failed(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "SLOW_READER",
                f"more than {self._max_queued_tokens} tokens waited for the client to read them",
                metadata={"resumable": "true"},
            )
        )
        self._on_overflow()
