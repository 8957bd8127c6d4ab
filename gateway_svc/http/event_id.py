"""Ids of server-sent events: positions in the output of a request, by which a client resumes."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from gateway_svc.generation.choice import ChoiceUpdate
from quire.service.errors import RequestError, invalid

# The id of the last event, after which nothing remains.
DONE = "done"
# One or several choices in a row at the same index, or that have ended.
_CHOICES = r"((\d{1,9}e?|e)(\*\d{1,3})?)"
# One or several prompts in a row that are equal.
_PROMPTS = rf"((-|{_CHOICES}(\.{_CHOICES})*)(x\d{{1,4}})?)"
_ID = re.compile(rf"{_PROMPTS}(,{_PROMPTS})*")
_UNOPENED = "-"
_REMEDY = "send the id of an event of this request, or no id for the stream from its beginning"
# No request has more; repetitions in the text of an id could otherwise describe any number.
_MAX_PROMPTS, _MAX_CHOICES = 1024, 16


class EventId:
    """Which tokens of each choice the client has, and whether it has the choice's end.

    As text: per choice the index of its next token, or `e` if the client has its end; choices of a
    prompt are separated by dots, prompts by commas, and `-` is a prompt of which the client has
    nothing. `*3` repeats a choice, `x3` a prompt. For example `e*7.12,-x3` is a prompt of which
    seven choices have ended, and three that wait. So the length of an id depends on the choices
    that run, not on those of the request.
    """

    def __init__(self, prompts: Sequence[Sequence[tuple[int, bool]]] = ()) -> None:
        """Per prompt and choice, the next token's index and whether the end was received."""
        self._prompts = [list(prompt) for prompt in prompts]
        # By prompt: each event changes that of one. None until it is needed.
        self._texts: list[str | None] = [None for _ in self._prompts]

    @classmethod
    def parse(cls, text: str) -> "EventId":
        """RequestError if the text is not an id of an event."""
        if not _ID.fullmatch(text):
            raise _invalid()
        prompts: list[list[tuple[int, bool]]] = []
        for part in text.split(","):
            prompt, _, count = part.partition("x")
            prompts += [_parse_prompt(prompt)] * _count(count, _MAX_PROMPTS - len(prompts))
        return cls(prompts)

    def check(self, num_prompts: int, num_choices: int) -> None:
        """RequestError if it is not the id of an event of a request with so many prompts, and
        choices per prompt."""
        if len(self._prompts) > num_prompts:
            raise _invalid(
                f"is for {len(self._prompts)} prompts; the request has {num_prompts}; {_REMEDY}"
            )
        for prompt, choices in enumerate(self._prompts):
            if choices and len(choices) != num_choices:
                raise _invalid(
                    f"is for {len(choices)} choices of prompt {prompt}; the request has "
                    f"{num_choices}; {_REMEDY}"
                )

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
        self._texts += [None] * missing
        choices = self._prompts[prompt]
        choices += [(0, False)] * (num_choices - len(choices))
        self._texts[prompt] = None

    def advance(self, prompt: int, update: ChoiceUpdate) -> None:
        """Add what an update of an open prompt contains."""
        next_index = update.first_index + len(update.token_ids)
        self._prompts[prompt][update.index] = (next_index, update.end is not None)
        self._texts[prompt] = None

    def __str__(self) -> str:
        texts = map(self._text, range(len(self._prompts)))
        return ",".join(_repeated(text, "x", group) for text, group in groupby(texts))

    def _text(self, prompt: int) -> str:
        text = self._texts[prompt]
        if text is None:
            text = self._texts[prompt] = _prompt_text(self._prompts[prompt])
        return text


def _prompt_text(choices: Iterable[tuple[int, bool]]) -> str:
    texts = ("e" if has_end else str(index) for index, has_end in choices)
    return ".".join(_repeated(text, "*", group) for text, group in groupby(texts)) or _UNOPENED


def _repeated(text: str, sign: str, group: Iterable[str]) -> str:
    count = sum(1 for _ in group)
    return text if count == 1 else f"{text}{sign}{count}"


def _parse_prompt(text: str) -> list[tuple[int, bool]]:
    if text == _UNOPENED:
        return []
    choices: list[tuple[int, bool]] = []
    for part in text.split("."):
        choice, _, count = part.partition("*")
        # The index of an ended choice is not needed: no event of it remains.
        parsed = (int(choice.removesuffix("e") or 0), choice.endswith("e"))
        choices += [parsed] * _count(count, _MAX_CHOICES - len(choices))
    return choices


def _count(text: str, most: int) -> int:
    """A number of repetitions, 1 if it is absent. RequestError if there are more than `most`."""
    count = int(text or 1)
    if not 1 <= count <= most:
        raise _invalid()
    return count


def _invalid(reason: str = "is not the id of an event") -> RequestError:
    return invalid("Last-Event-ID", "INVALID_EVENT_ID", reason)
