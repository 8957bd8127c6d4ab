"""One request's life: checked, submitted, accepted, written, ended; or left."""

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from gateway_svc import prompts, validation
from gateway_svc.choice import Choice, Outcome, Written
from gateway_svc.detokenizer import Detokenizer
from gateway_svc.multiplexer import Multiplexer
from gateway_svc.request_stream import Accepted, Ended, Event, NewTokens, RequestStream
from gateway_svc.served_model import Model
from gateway_svc.validation import GenerationRequest
from quire.internal.v1 import scheduler_pb2
from quire.service.errors import RequestError

log = structlog.get_logger()


@dataclass(frozen=True)
class Submitted:
    """A checked request, as the scheduler gets it, and the choice that it writes."""

    submission: scheduler_pb2.Submission
    choice: Choice


async def prepare(
    request: GenerationRequest, model: Model, max_model_len: int | None, deadline_s: float | None
) -> Submitted:
    """RequestError names the field at fault. `deadline_s` is how long the client waits."""
    limits = model.limits(max_model_len)
    validation.check_request(request, limits)
    deadline_ms = None if deadline_s is None else round((time.time() + deadline_s) * 1000)
    prompt = await prompts.tokenize(request, model, limits)
    request_id = request.request_id or secrets.token_hex(16)
    params = request.sampling_params
    resolved = validation.resolve(params, request_id, len(prompt.token_ids), limits)
    detokenizer = Detokenizer(
        model.vocabulary,
        skip_special_tokens=params.skip_special_tokens
        or not params.HasField("skip_special_tokens"),
        context=prompt.token_ids if prompt.is_continued else (),
    )
    submission = scheduler_pb2.Submission(
        request_id=request_id,
        digest=hashlib.sha256(request.SerializeToString(deterministic=True)).digest(),
        prompt_token_ids=prompt.token_ids,
        params=resolved,
        deadline_ms=deadline_ms,
        cache_salt=request.cache_salt.encode(),
    )
    return Submitted(submission, Choice(detokenizer, params.stop, {*resolved.stop_token_ids}))


class Generation:
    """A request that the scheduler has been given, until its choice has ended."""

    def __init__(self, submitted: Submitted, requests: Multiplexer, stream: RequestStream) -> None:
        self.request_id = submitted.submission.request_id
        self.num_prompt_tokens = len(submitted.submission.prompt_token_ids)
        # How it ended; None until it has.
        self.outcome: Outcome | None = None
        self.first_token_at: float | None = None
        self._choice = submitted.choice
        self._requests = requests
        self._stream = stream

    @property
    def num_tokens(self) -> int:
        return self._choice.num_tokens if self.outcome is None else self.outcome.num_tokens

    async def updates(self) -> AsyncIterator[Written]:
        """First an empty one, at acceptance; then what came since the one before; with the last
        one there is an outcome. RequestError as the scheduler says.
        """
        while self.outcome is None:
            events = await self._stream.take()
            if Accepted() in events:
                yield Written("", (), 0)
            written = self._write(events)
            if written.token_ids or self.outcome is not None:
                yield written

    def _write(self, events: Sequence[Event]) -> Written:
        was_stopped = self._choice.stop_string is not None
        first_index = self._choice.num_tokens
        text = ""
        token_ids: list[int] = []
        for event in events:
            match event:
                case NewTokens():
                    part = self._choice.write(event)
                case Ended():
                    part, self.outcome = self._choice.end(event)
                case Accepted():
                    continue
            text += part.text
            token_ids += part.token_ids
        if token_ids and self.first_token_at is None:
            self.first_token_at = time.monotonic()
        if self._choice.stop_string is not None and not was_stopped:
            self._requests.finish(self._stream, self._choice.num_tokens)
        return Written(text, tuple(token_ids), first_index)


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
        end = "stop" if generation.outcome and generation.outcome.is_stop else "length"
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
