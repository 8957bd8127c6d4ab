"""One request's life at the scheduler: submitted, accepted, written, ended; or left."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

import structlog

from gateway_svc.choice import Choice, Written
from gateway_svc.multiplexer import Multiplexer
from gateway_svc.request_stream import Accepted, Ended, Event, NewTokens, RequestStream
from gateway_svc.submission import Submitted
from quire.service.errors import RequestError

log = structlog.get_logger()


class Generation:
    """A request that the scheduler has been given, until every choice of it has ended."""

    def __init__(self, submitted: Submitted, requests: Multiplexer, stream: RequestStream) -> None:
        self.request_id = submitted.submission.request_id
        self.num_prompt_tokens = len(submitted.submission.prompt_token_ids)
        # By their indices.
        self.choices = tuple(submitted.choices)
        self.first_token_at: float | None = None
        self._requests = requests
        self._stream = stream

    @property
    def has_ended(self) -> bool:
        return all(choice.outcome is not None for choice in self.choices)

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
        """
        while not self.has_ended:
            events = await self._stream.take()
            if Accepted() in events:
                yield ()
            if update := self._write(events):
                yield update

    def _write(self, events: Iterable[Event]) -> list[Written]:
        by_choice: dict[int, list[NewTokens | Ended]] = defaultdict(list)
        for event in events:
            if not isinstance(event, Accepted):
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


@asynccontextmanager
async def running(submitted: Submitted, requests: Multiplexer) -> AsyncIterator[Generation]:
    """Submits a request. Leaving before its end, by whatever way, cancels it."""
    started_at = time.monotonic()
    task = asyncio.current_task()
    assert task is not None
    # A client that does not read holds its call in a write, which only a cancellation ends.
    stream = requests.submit(submitted.submission, on_overflow=task.cancel)
    generation = Generation(submitted, requests, stream)
    end = "cancelled"
    try:
        yield generation
        end = ",".join(map(_end_of, generation.choices))
    except asyncio.CancelledError:
        if stream.error is None:
            raise
        end = stream.error.code.name.lower()
        raise stream.error from None
    except RequestError as error:
        end = error.code.name.lower()
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
