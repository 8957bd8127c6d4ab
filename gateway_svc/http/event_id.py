"""Ids of server-sent events: positions in the output of a request, by which a client resumes."""

import re
from collections.abc import Sequence

from gateway_svc.generation.choice import ChoiceUpdate
from quire.service.errors import invalid

# The id of the last event, after which nothing remains.
DONE = "done"
_PROMPT = r"(-|\d{1,9}e?(\.\d{1,9}e?)*)"
_ID = re.compile(rf"{_PROMPT}(,{_PROMPT})*")
_UNOPENED = "-"


class EventId:
    """Which tokens of each choice the client has, and whether it has the choice's end.

    As text: per choice the index of its next token, with `e` after the end; choices of a prompt
    are separated by dots, prompts by commas, and `-` is a prompt of which the client has nothing.
    For example `12e.7,-`.
    """

    def __init__(self, prompts: Sequence[Sequence[tuple[int, bool]]] = ()) -> None:
        """Per prompt and choice, the next token's index and whether the end was received."""
        self._prompts = [list(prompt) for prompt in prompts]

    @classmethod
    def parse(cls, text: str) -> "EventId":
        """RequestError if the text is not an id of an event."""
        if not _ID.fullmatch(text):
            raise invalid("Last-Event-ID", "INVALID_EVENT_ID", "is not the id of an event")
        return cls([_parse_prompt(prompt) for prompt in text.split(",")])

    def is_open(self, prompt: int) -> bool:
        """Whether the client has any event of the prompt."""
        return prompt < len(self._prompts) and bool(self._prompts[prompt])

    def next_indices(self, prompt: int) -> list[int]:
        """Per choice of a prompt, the index of the next token; empty if it is not open."""
        return [index for index, _ in self._prompts[prompt]] if self.is_open(prompt) else []

    def has_end(self, prompt: int, choice: int) -> bool:
        choices = self._prompts[prompt] if self.is_open(prompt) else []
        return choice < len(choices) and choices[choice][1]

    def open(self, prompt: int, num_choices: int) -> None:
        """Add the choices of a prompt, where they are absent."""
        missing = prompt + 1 - len(self._prompts)
        self._prompts += [[] for _ in range(missing)]
        choices = self._prompts[prompt]
        choices += [(0, False)] * (num_choices - len(choices))

    def advance(self, prompt: int, update: ChoiceUpdate) -> None:
        """Add what an update of an open prompt contains."""
        next_index = update.first_index + len(update.token_ids)
        self._prompts[prompt][update.index] = (next_index, update.end is not None)

    def __str__(self) -> str:
        return ",".join(
            ".".join(f"{index}{'e' * has_end}" for index, has_end in prompt) or _UNOPENED
            for prompt in self._prompts
        )


def _parse_prompt(text: str) -> list[tuple[int, bool]]:
    if text == _UNOPENED:
        return []
    return [(int(part.removesuffix("e")), part.endswith("e")) for part in text.split(".")]
