"""Writes the updates of a request's generations in a format."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from gateway_svc.generation.choice import ChoiceEnd, ChoiceUpdate
from gateway_svc.generation.generation import Generation
from gateway_svc.http.event_id import DONE, EventId
from gateway_svc.http.formats.format import Format, Output, ServerEvent, Usage
from gateway_svc.http.generations import PromptUpdate, Updates
from gateway_svc.http.response_writer import ResponseWriter
from quire.internal.v1 import gateway_pb2

# Tokens whose log-probabilities take more than some milliseconds to convert.
_MANY_LOGPROBS = 512

# Makes the format at the first update, when the state of a request of another gateway is known.
MakeFormat = Callable[[PromptUpdate], Format]


async def write_events(
    updates: Updates,
    make_format: MakeFormat,
    event_id: EventId,
    writer: ResponseWriter,
) -> None:
    """Write a stream. Its client has everything before `event_id`."""
    generations = _Generations()
    form: Format | None = None
    async with aclosing(updates):
        async for update in updates:
            generations.add(update)
            if form is None:
                form = make_format(update)
                writer.use_for_errors(form.error_events)
            num_choices = len(update.generation.choices)
            await writer.start()
            if not event_id.is_open(update.prompt):
                event_id.open(update.prompt, num_choices)
                first = update.prompt * num_choices
                events = [
                    *form.first_events(
                        range(first, first + num_choices), _prompt_token_ids(update.generation)
                    ),
                    *(
                        event
                        for echo in _echoes(update.generation)
                        for event in form.events(first + echo.index, echo, generations.usage)
                    ),
                ]
                await writer.events(events, event_id)
            for part in update.parts:
                if event_id.has_end(update.prompt, part.index):
                    continue
                event_id.advance(update.prompt, part)
                index = update.prompt * num_choices + part.index
                shown = _shown(part, update.generation)
                await writer.events(await _events(form, index, shown, generations.usage), event_id)
    assert form is not None
    await writer.events(form.last_events(generations.usage()), DONE)
    await writer.end(DONE)


async def write_object(updates: Updates, make_format: MakeFormat, writer: ResponseWriter) -> None:
    """Write the whole output as one object."""
    collector = Collector(make_format)
    async with aclosing(updates):
        async for update in updates:
            collector.add(update)
    # In a thread if it may take long: a prompt may have a million log-probabilities.
    is_large = collector.has_prompt_logprobs
    await writer.json(
        200, await asyncio.to_thread(collector.body) if is_large else collector.body()
    )


class Collector:
    """Collects the output of a request for one object."""

    def __init__(self, make_format: MakeFormat) -> None:
        self._make_format = make_format
        self._form: Format | None = None
        self._generations = _Generations()
        # By prompt, then by choice.
        self._outputs: dict[int, list[Output]] = {}

    def add(self, update: PromptUpdate) -> None:
        generation = update.generation
        self._generations.add(update)
        self._form = self._form or self._make_format(update)
        outputs = self._outputs.get(update.prompt)
        if outputs is None:
            outputs = self._outputs[update.prompt] = [Output() for _ in generation.choices]
            for output in outputs:
                output.prompt_token_ids = _prompt_token_ids(generation)
            for echo in _echoes(generation):
                outputs[echo.index].add(echo)
        for part in update.parts:
            output = outputs[part.index]
            output.add(_shown(part, generation))
            if generation.state is not None and generation.state.http.return_prompt_logprobs:
                output.prompt_logprobs = generation.prompt_logprobs

    @property
    def has_prompt_logprobs(self) -> bool:
        return self._generations.have_prompt_logprobs

    def body(self) -> dict[str, Any]:
        """The object; at least one update was added."""
        assert self._form is not None
        outputs = [one for _, outputs in sorted(self._outputs.items()) for one in outputs]
        return self._form.body(outputs, self._generations.usage())


async def _events(
    form: Format, index: int, update: ChoiceUpdate, usage: Callable[[], Usage]
) -> Iterable[ServerEvent]:
    """The events of an update; those of a long prompt are made in a thread."""
    if len(update.logprobs) < _MANY_LOGPROBS:
        return form.events(index, update, usage)
    return await asyncio.to_thread(lambda: list(form.events(index, update, usage)))


def _prompt_token_ids(generation: Generation) -> list[int] | None:
    """Those of the prompt, if the client wants them."""
    state = generation.state
    if state is None or not state.http.return_token_ids:
        return None
    return list(state.http.prompt_token_ids)


def _echoes(generation: Generation) -> list[ChoiceUpdate]:
    """The prompt's text as the first update of each choice, if the client wants it, without
    log-probabilities: those are known only with the first token."""
    state = generation.state
    if state is None or not state.http.echo or state.http.echo_logprobs:
        return []
    return [
        ChoiceUpdate(choice.index, state.http.echo, (), 0, None) for choice in generation.choices
    ]


def _shown(part: ChoiceUpdate, generation: Generation) -> ChoiceUpdate:
    """What the client receives of an update: with the prompt before the first token, if it has
    log-probabilities, and without the output if none is wanted."""
    http = generation.state.http if generation.state is not None else gateway_pb2.HttpState()
    shown = part
    if http.omit_output:
        end = part.end and ChoiceEnd(part.end.num_cached_prompt_tokens)
        shown = ChoiceUpdate(part.index, "", (), part.first_index, end)
    if http.echo_logprobs and part.first_index == 0 and part.token_ids:
        assert generation.prompt_logprobs is not None
        shown = replace(
            shown,
            text=http.echo + shown.text,
            logprobs=(*generation.prompt_logprobs, *shown.logprobs),
            text_offsets=(*http.echo_offsets, *shown.text_offsets),
        )
    return shown


class _Generations:
    """The generations of a request's prompts, as far as they were accepted."""

    def __init__(self) -> None:
        self._by_prompt: dict[int, Generation] = {}

    def add(self, update: PromptUpdate) -> None:
        self._by_prompt[update.prompt] = update.generation

    @property
    def have_prompt_logprobs(self) -> bool:
        return any(one.prompt_logprobs is not None for one in self._by_prompt.values())

    def usage(self) -> Usage:
        """The usage so far."""
        found = self._by_prompt.values()
        return Usage(
            sum(generation.num_prompt_tokens for generation in found),
            sum(generation.num_tokens for generation in found if not _omits_output(generation)),
            sum(generation.num_cached_prompt_tokens for generation in found),
            sum(generation.num_reasoning_tokens for generation in found),
        )


def _omits_output(generation: Generation) -> bool:
    return generation.state is not None and generation.state.http.omit_output
