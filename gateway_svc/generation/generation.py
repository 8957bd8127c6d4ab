"""Runs one request at the scheduler, from submission or resumption to its end."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import structlog

from gateway_svc.generation.beam_search import SearchOutput
from gateway_svc.generation.choice import Choice, ChoiceUpdate, create_choices
from gateway_svc.generation.error_fields import with_prompt_field
from gateway_svc.generation.submission import PreparedRequest
from gateway_svc.scheduler.events import (
    Accepted,
    ChoiceEvent,
    Ended,
    Event,
    NewTokens,
    TokenLogprobs,
    split_prompt_logprobs,
)
from gateway_svc.scheduler.request_router import RequestRouter
from gateway_svc.scheduler.request_stream import RequestStream
from gateway_svc.text.served_model import ServedModel
from gateway_svc.tracing.call_trace import current_trace
from gateway_svc.tracing.generation_attributes import GenerationResult, add_result
from quire.internal.v1 import gateway_pb2, scheduler_pb2
from quire.service.errors import RequestError
from quire.v1 import inference_pb2

log = structlog.get_logger()

# Tokens decoded before yielding to the event loop: some milliseconds of work.
_CHUNK_TOKENS = 256

_CreateChoices = Callable[[gateway_pb2.ResumeState], Sequence[Choice]]


class Generation:
    """A request submitted to the scheduler, until all its choices have ended."""

    def __init__(
        self,
        requests: RequestRouter,
        stream: RequestStream,
        create_choices: _CreateChoices,
        prompt_field: str | None,
    ) -> None:
        self.request_id = stream.request.request_id
        # By index; empty until the acceptance of a request that another gateway submitted.
        self.choices: Sequence[Choice] = ()
        self.first_token_at: float | None = None
        # One per token of the prompt, known before the first update with tokens; None unless
        # requested.
        self.prompt_logprobs: Sequence[TokenLogprobs] | None = None
        # Events of other choices that arrived before the first token of choice 0, with which the
        # log-probabilities of the prompt come.
        self._held: list[ChoiceEvent] = []
        self._was_accepted = False
        # Of a beam search, from its acceptance on.
        self.search: SearchOutput | None = None
        self._requests = requests
        self._stream = stream
        self._create_choices = create_choices
        self._prompt_field = prompt_field

    @property
    def has_ended(self) -> bool:
        return bool(self.choices) and all(choice.end is not None for choice in self.choices)

    @property
    def state(self) -> gateway_pb2.ResumeState | None:
        """What any gateway needs to continue the output; None until the acceptance of a request
        that another gateway submitted."""
        return self._stream.state

    @property
    def num_prompt_tokens(self) -> int:
        state = self._stream.state
        return 0 if state is None else state.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(choice.num_reasoning_tokens for choice in self.choices)

    @property
    def num_cached_prompt_tokens(self) -> int:
        """Of the prompt that all choices share, as reported for choice 0."""
        end = self.choices[0].end
        return 0 if end is None else end.num_cached_prompt_tokens

    async def updates(self) -> AsyncIterator[Sequence[ChoiceUpdate]]:
        """Yield an empty update at acceptance, then the updates of the choices that changed.
        RequestError if the scheduler fails the request.

        With deferred delivery the first update has the first token, and later ones have at least
        `_CHUNK_TOKENS` tokens, except at the end.
        """
        while not self.has_ended:
            try:
                events = await self._stream.get(self._min_tokens)
            except RequestError as error:
                raise with_prompt_field(error, self._prompt_field) from error
            if not self.choices and self._stream.state is not None:
                self.choices = self._create_choices(self._stream.state)
                if self._stream.state.HasField("search"):
                    self.search = SearchOutput(self._stream.state)
            if not self._was_accepted and Accepted() in events:
                self._was_accepted = True
                yield ()
            if self.search is not None:
                events = self.search.take(events)
            for number, chunk in enumerate(_chunk_events(self._with_prompt(events))):
                if number:
                    await asyncio.sleep(0)
                if update := self._process(chunk):
                    yield update

    def _with_prompt(self, events: list[Event]) -> list[Event]:
        """The events that may be processed: none until the log-probabilities of the prompt are
        known, if they are wanted."""
        state = self._stream.state
        if state is None or not state.HasField("first_prompt_token_id"):
            return events
        if self.prompt_logprobs is None:
            self._held += [event for event in events if not isinstance(event, Accepted)]
            first = next((one for one in self._held if one.choice == 0), None)
            if first is None:
                return []
            events, self._held = [*self._held], []
            if isinstance(first, Ended):
                # Without tokens it has nothing to be requested for.
                self.prompt_logprobs = ()
                return events
            self.prompt_logprobs = [
                TokenLogprobs.of_first(state.first_prompt_token_id),
                *split_prompt_logprobs(first.prompt_logprobs, state.num_prompt_tokens - 1),
            ]
        return events

    @property
    def _min_tokens(self) -> int:
        if not self._stream.is_deferred:
            return 0
        return 1 if self.first_token_at is None else _CHUNK_TOKENS

    def _process(self, events: Sequence[ChoiceEvent]) -> list[ChoiceUpdate]:
        if len(events) == 1:
            parts = [self._advance(self.choices[events[0].choice], events)]
        else:
            by_choice: dict[int, list[ChoiceEvent]] = defaultdict(list)
            for event in events:
                by_choice[event.choice].append(event)
            parts = [self._advance(self.choices[i], by_choice[i]) for i in sorted(by_choice)]
        update = [part for part in parts if part.token_ids or part.end is not None]
        if update and self.first_token_at is None:
            self.first_token_at = time.monotonic()
        return update

    def _advance(self, choice: Choice, events: Iterable[ChoiceEvent]) -> ChoiceUpdate:
        was_stopped = choice.has_stopped
        update = choice.process(events)
        if choice.has_stopped and not was_stopped:
            self._requests.finish(self._stream, choice.index, choice.num_tokens)
        return update


def _chunk_events(events: Sequence[Event]) -> Iterable[Sequence[ChoiceEvent]]:
    """Split events, in order, into lists of at most `_CHUNK_TOKENS` tokens."""
    if len(events) == 1:
        [event] = events
        # What a stream gets from most steps.
        if isinstance(event, NewTokens) and len(event.token_ids) <= _CHUNK_TOKENS:
            return ((event,),)
    return _chunks(events)


def _chunks(events: Iterable[Event]) -> Iterator[list[ChoiceEvent]]:
    chunk: list[ChoiceEvent] = []
    room = _CHUNK_TOKENS
    for event in _split_long_events(events):
        num_tokens = 0 if isinstance(event, Ended) else len(event.token_ids)
        if num_tokens > room:
            yield chunk
            chunk, room = [], _CHUNK_TOKENS
        chunk.append(event)
        room -= num_tokens
    if chunk:
        yield chunk


def _split_long_events(events: Iterable[Event]) -> Iterator[ChoiceEvent]:
    """Drop acceptances and split events of more than `_CHUNK_TOKENS` tokens."""
    for event in events:
        if isinstance(event, Accepted):
            continue
        if isinstance(event, Ended) or len(event.token_ids) <= _CHUNK_TOKENS:
            yield event
            continue
        for at in range(0, len(event.token_ids), _CHUNK_TOKENS):
            part = slice(at, at + _CHUNK_TOKENS)
            token_ids, logprobs = event.token_ids[part], event.logprobs[part]
            of_prompt = b"" if at else event.prompt_logprobs
            yield NewTokens(event.choice, event.first_index + at, token_ids, logprobs, of_prompt)


def start(
    prepared: PreparedRequest, requests: RequestRouter
) -> AbstractAsyncContextManager[Generation]:
    """Submit a request. Exiting before its end cancels it, unless it may be resumed."""
    try:
        stream = requests.submit(prepared.submission, prepared.resume_state, _cancel_this_task())
    except RequestError as error:
        raise with_prompt_field(error, prepared.prompt_field) from error
    return _closing(requests, stream, lambda state: prepared.choices, prepared.prompt_field)


def resume(
    request: inference_pb2.ResumeGenerateRequest,
    principal: str,
    stream_interval: int,
    served: ServedModel,
    requests: RequestRouter,
) -> AbstractAsyncContextManager[Generation]:
    """Resume a live or finished request; exit as `start` does.

    Requests all tokens, as the text after the client's next tokens depends on those before.
    """
    attachment = scheduler_pb2.Attachment(
        request_id=request.request_id, principal=principal, stream_interval=stream_interval
    )
    stream = requests.attach(attachment, _cancel_this_task())
    return _closing(
        requests,
        stream,
        lambda state: create_choices(
            request.request_id,
            state,
            served.get(state.model, field=None),
            request.next_token_indices,
        ),
        None,
    )


def _cancel_this_task() -> Callable[[], object]:
    """Return a callback that ends this call, even during a write to a slow client."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancel


@asynccontextmanager
async def _closing(
    requests: RequestRouter,
    stream: RequestStream,
    create_choices: _CreateChoices,
    prompt_field: str | None,
) -> AsyncIterator[Generation]:
    """Yield the request; close its stream and log its end on exit."""
    generation = Generation(requests, stream, create_choices, prompt_field)
    started_at = time.monotonic()
    end = "cancelled"
    try:
        yield generation
        end = ",".join(map(_finish_reason, generation.choices))
    except asyncio.CancelledError:
        if stream.error is None:
            raise
        end = stream.error.code.name.lower()
        raise stream.error from None
    except RequestError as error:
        end = error.code.name.lower()
        requests.detach(stream)
        raise
    except Exception:
        end = "internal"
        raise
    finally:
        requests.close(stream)
        _log_end(generation, end, started_at)
        _trace_end(generation)


def _finish_reason(choice: Choice) -> str:
    return "stop" if choice.end and choice.end.is_stop else "length"


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


def _trace_end(generation: Generation) -> None:
    trace = current_trace()
    if trace is None or not trace.is_recorded:
        return
    has_ended = generation.has_ended
    add_result(
        trace,
        GenerationResult(
            request_id=generation.request_id,
            num_prompt_tokens=generation.num_prompt_tokens,
            num_cached_prompt_tokens=generation.num_cached_prompt_tokens if has_ended else 0,
            num_tokens=generation.num_tokens,
            num_reasoning_tokens=generation.num_reasoning_tokens,
            first_token_at=generation.first_token_at,
            finish_reasons=[_finish_reason(one) for one in generation.choices] if has_ended else (),
        ),
    )
