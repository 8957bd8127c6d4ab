"""Writes the updates of a request's generations in a format."""

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from gateway_svc.generation.choice import ChoiceUpdate
from gateway_svc.generation.generation import Generation
from gateway_svc.http.formats.format import Format, Output, Usage
from gateway_svc.http.generations import PromptUpdate, Updates
from gateway_svc.http.positions import DONE, Positions
from gateway_svc.http.response_writer import ResponseWriter

# Makes the format at the first update, when the state of a request of another gateway is known.
MakeFormat = Callable[[Generation], Format]


async def write_events(
    updates: Updates,
    make_format: MakeFormat,
    positions: Positions,
    writer: ResponseWriter,
) -> None:
    """Write a stream. Its client has everything before `positions`."""
    generations = _Generations()
    form: Format | None = None
    async with aclosing(updates):
        async for update in updates:
            generations.add(update)
            form = form or make_format(update.generation)
            num_choices = len(update.generation.choices)
            await writer.start()
            if not positions.is_open(update.prompt):
                positions.open(update.prompt, num_choices)
                first = update.prompt * num_choices
                events = [
                    *form.first_events(range(first, first + num_choices)),
                    *(
                        event
                        for echo in _echoes(update.generation)
                        for event in form.events(first + echo.index, echo, generations.usage())
                    ),
                ]
                await writer.events(events, str(positions))
            for part in update.parts:
                if positions.has_end(update.prompt, part.index):
                    continue
                positions.advance(update.prompt, part)
                index = update.prompt * num_choices + part.index
                usage = generations.usage()
                await writer.events(form.events(index, part, usage), str(positions))
    assert form is not None
    await writer.events(form.last_events(generations.usage()), DONE)
    await writer.end(DONE)


async def write_object(updates: Updates, make_format: MakeFormat, writer: ResponseWriter) -> None:
    """Write the whole output as one object."""
    collector = Collector(make_format)
    async with aclosing(updates):
        async for update in updates:
            collector.add(update)
    await writer.json(200, collector.body())


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
        self._form = self._form or self._make_format(generation)
        outputs = self._outputs.get(update.prompt)
        if outputs is None:
            outputs = self._outputs[update.prompt] = [Output() for _ in generation.choices]
            for echo in _echoes(generation):
                outputs[echo.index].add(echo)
        for part in update.parts:
            outputs[part.index].add(part)

    def body(self) -> dict[str, Any]:
        """The object; at least one update was added."""
        assert self._form is not None
        outputs = [one for _, outputs in sorted(self._outputs.items()) for one in outputs]
        return self._form.body(outputs, self._generations.usage())


def _echoes(generation: Generation) -> list[ChoiceUpdate]:
    """The prompt's text as the first update of each choice, if the client wants it."""
    state = generation.state
    if state is None or not state.http.echo:
        return []
    return [
        ChoiceUpdate(choice.index, state.http.echo, (), 0, None) for choice in generation.choices
    ]


class _Generations:
    """The generations of a request's prompts, as far as they were accepted."""

    def __init__(self) -> None:
        self._by_prompt: dict[int, Generation] = {}

    def add(self, update: PromptUpdate) -> None:
        self._by_prompt[update.prompt] = update.generation

    def usage(self) -> Usage:
        found = self._by_prompt.values()
        return Usage(
            sum(generation.num_prompt_tokens for generation in found),
            sum(generation.num_tokens for generation in found),
            sum(generation.num_cached_prompt_tokens for generation in found),
        )
