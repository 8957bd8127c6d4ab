"""Pieces that a model's output consists of."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text before the content, in which the model reasons."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The start of a call of a tool. Calls are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class Arguments:
    """The next part of a call's arguments, which are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The call is complete."""

    index: int


Piece = Content | Reasoning | CallStart | Arguments | CallEnd


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same pieces, with adjacent ones of one kind joined, and without empty ones."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        match piece, last:
            case ((Content("") | Reasoning("") | Arguments(_, "")), _):
                continue
            case Content(text), Content(before):
                result[-1] = Content(before + text)
            case Reasoning(text), Reasoning(before):
                result[-1] = Reasoning(before + text)
            case Arguments(index, text), Arguments(of, before) if index == of:
                result[-1] = Arguments(index, before + text)
            case _:
                result.append(piece)
    return result
