"""One request's life at the scheduler: submitted or resumed, accepted, written, ended; or left."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager

import structlog

from gateway_svc.choice import Choice, Written
from gateway_svc.continuation import choices_of
from gateway_svc.multiplexer import Multiplexer
from gateway_svc.request_stream import Accepted, Ended, Event, NewTokens, RequestStream
from gateway_svc.served_model import ServedModel
from gateway_svc.submission import Submitted
from quire.internal.v1 import gateway_pb2, scheduler_pb2
from quire.service.errors import RequestError

log = structlog.get_logger()

# Others have a turn between pieces of a long replay: some milliseconds of detokenizing.
_PIECE_TOKENS = 256

_Choices = Callable[[gateway_pb2.StreamState], Sequence[Choice]]


class Generation:
    """A request that the scheduler has been asked for, until every choice of it has ended."""

    def __init__(self, requests: Multiplexer, stream: RequestStream, choices: _Choices) -> None:
        self.request_id = stream.wanted.request_id
        # By their indices; none before the acceptance of a request that another gateway began.
        self.choices: Sequence[Choice] = ()
        self.first_token_at: float | None = None
        self._requests = requests
        self._stream = stream
        self._choices = choices

    @property
    def has_ended(self) -> bool:
        return bool(self.choices) and all(choice.outcome is not None for choice in self.choices)

    @property
    def num_prompt_tokens(self) -> int:
        state = self._stream.state
        return 0 if state is None else state.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_cached_prompt_tokens(self) -> int:
        """Of the one prompt, which choice 0 is the first to continue."""
        outcome = self.choices[0].outcome
        return 0 if outcome is None else outcome.num_cached_prompt_tokens

    async def updates(self) -> AsyncIterator[Sequence[Written]]:
        """First an empty one, at acceptance; then what came since the one before, an entry for
        each choice that something came for. RequestError as the scheduler says.

        Of a patient request the first one comes with its first token, the others as there is
        enough to write at once.
        """
        while not self.has_ended:
            events = await self._stream.take(self._least_tokens)
            if not self.choices and self._stream.state is not None:
                self.choices = self._choices(self._stream.state)
            if Accepted() in events:
                yield ()
            for number, piece in enumerate(_pieces(events)):
                if number:
                    await asyncio.sleep(0)
                if update := self._write(piece):
                    yield update

    @property
    def _least_tokens(self) -> int:
        if not self._stream.is_patient:
            return 0
        return 1 if self.first_token_at is None else _PIECE_TOKENS

    def _write(self, events: Iterable[NewTokens | Ended]) -> list[Written]:
        by_choice: dict[int, list[NewTokens | Ended]] = defaultdict(list)
        for event in events:
            by_choice[event.choice].append(event)
        written = [self._advance(self.choices[i], by_choice[i]) for i in sorted(by_choice)]
        update = [part for part in written if part.token_ids or part.outcome is not None]
        if update and self.first_token_at is None:
            self.first_token_at = time.monotonic()
        return update

    def _advance(self, choice: Choice, events: Iterable[NewTokens | Ended]) -> Written:
        was_stopped = choice.stop_string is not None
        written = choice.take(events)
        if choice.stop_string is not None and not was_stopped:
            self._requests.finish(self._stream, choice.index, choice.num_tokens)
        return written


def _pieces(events: Iterable[Event]) -> Iterator[list[NewTokens | Ended]]:
    """The same events in their order, in lists that are quick to write."""
    piece: list[NewTokens | Ended] = []
    room = _PIECE_TOKENS
    for event in _in_parts(events):
        num_tokens = 0 if isinstance(event, Ended) else len(event.token_ids)
        if num_tokens > room:
            yield piece
            piece, room = [], _PIECE_TOKENS
        piece.append(event)
        room -= num_tokens
    if piece:
        yield piece


def _in_parts(events: Iterable[Event]) -> Iterator[NewTokens | Ended]:
    """Without acceptances; tokens that are many are cut."""
    for event in events:
        if isinstance(event, Accepted):
            continue
        if isinstance(event, Ended) or len(event.token_ids) <= _PIECE_TOKENS:
            yield event
            continue
        for at in range(0, len(event.token_ids), _PIECE_TOKENS):
            part = slice(at, at + _PIECE_TOKENS)
            yield NewTokens(
                event.choice,
                event.first_index + at,
                event.token_ids[part],
                event.logprobs[part],
            )


@asynccontextmanager
async def running(submitted: Submitted, requests: Multiplexer) -> AsyncIterator[Generation]:
    """Submits a request. A client that leaves before its end cancels it, unless it may be
    resumed.
    """
    stream = requests.submit(submitted.submission, submitted.state, on_overflow=_cancel_here())
    generation = Generation(requests, stream, lambda state: submitted.choices)
    async with _followed(generation, requests, stream):
        yield generation


@asynccontextmanager
async def resumed(
    request_id: str, next_indices: Sequence[int], served: ServedModel, requests: Multiplexer
) -> AsyncIterator[Generation]:
    """Takes over a request that runs or has ended, from `next_indices` on; left as another is.

    All of its tokens are asked for: the text behind the client's depends on those before.
    """

    def choices(state: gateway_pb2.StreamState) -> Sequence[Choice]:
        return choices_of(state, served.named(state.model), next_indices)

    attachment = scheduler_pb2.Attachment(request_id=request_id)
    stream = requests.attach(attachment, on_overflow=_cancel_here())
    generation = Generation(requests, stream, choices)
    async with _followed(generation, requests, stream):
        yield generation


def _cancel_here() -> Callable[[], object]:
    """Ends this call: a client that does not read holds it in a write, which nothing else ends."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancel


@asynccontextmanager
async def _followed(
    generation: Generation, requests: Multiplexer, stream: RequestStream
) -> AsyncIterator[None]:
    started_at = time.monotonic()
    end = "cancelled"
    try:
        yield
        end = ",".join(map(_end_of, generation.choices))
    except asyncio.CancelledError:
        if stream.error is None:
            raise
        end = stream.error.code.name.lower()
        raise stream.error from None
    except RequestError as error:
        end = error.code.name.lower()
        requests.release(stream)
        raise
    except Exception:
        end = "internal"
        raise
    finally:
        requests.leave(stream)
        _log_end(generation, end, started_at)


def _end_of(choice: Choice) -> str:
    return "stop" if choice.outcome and choice.outcome.is_stop else "length"


def _log_end(generation: Generation, end: str, started_at: float) -> None:
    first_at = generation.first_token_at
    log.info(
        "request ended",
        request_id=generation.request_id,
        end=end,
        prompt_tokens=generation.num_prompt_tokens,
        completion_tokens=generation.num_tokens,
        first_token_s=None if first_at is None else round(first_at - started_at, 4),
        total_s=round(time.monotonic() - started_at, 4),
    )
