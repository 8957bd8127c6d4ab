"""What rank 0 sends to the others: one message per forward pass, with its prepared inputs.

Followers have no row tables. A message is complete by itself, so no change of rank 0's tables,
such as a sampled token, a failed row or a jump, has to be repeated elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.int32]

# Most messages of decode steps fit into the first part, whose size is fixed.
_FIRST_WORDS: Final = 4096
_MOST_ARRAYS: Final = 11
# Kind, number of words, then for each array the number of its words and of its columns (0: none).
_HEADER_WORDS: Final = 2 + 2 * _MOST_ARRAYS


class Kind(IntEnum):
    """What a rank does with a message."""

    LOGITS = 1  # a forward pass: `PASS` arrays
    STATES = 2  # the same up to the head
    HEAD = 3  # logits of tokens of the last such pass: their indices
    MOVES = 4  # of blocks: sources and destinations of swaps out, swaps in, copies
    STOP = 5
    STEP = 6  # of ranks on GPUs: the arrays of `StepArrays`


@dataclass(frozen=True)
class Message:
    """A kind and its arrays, of one or two dimensions."""

    kind: Kind
    arrays: tuple[NDArray[Any], ...] = ()


class Broadcast(Protocol):
    """Copies the words of rank 0 to all other ranks, which may ask for one part at a time."""

    def __call__(self, parts: Sequence[Tensor]) -> None: ...


class Messages:
    """Messages as int32 words: a first part of fixed size, and the rest, if any, in a second. Ids,
    positions and slots are less than 2**31."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast
        self._first = torch.zeros(_FIRST_WORDS, dtype=torch.int32)
        self._words: Words = self._first.numpy()

    def send(self, kind: Kind, arrays: Sequence[NDArray[Any]] = ()) -> None:
        """On rank 0."""
        sizes = [array.size for array in arrays]
        num_words = _HEADER_WORDS + sum(sizes)
        words = self._room(num_words)
        words[:2] = kind, num_words
        words[2:_HEADER_WORDS] = 0
        start = _HEADER_WORDS
        for i, (array, size) in enumerate(zip(arrays, sizes, strict=True)):
            words[2 + 2 * i] = size
            words[3 + 2 * i] = array.shape[1] if array.ndim == 2 else 0
            words[start : start + size] = array.reshape(-1)
            start += size
        if num_words > _FIRST_WORDS:
            self._words[:] = words[:_FIRST_WORDS]
            self._broadcast([self._first, torch.from_numpy(words[_FIRST_WORDS:])])
        else:
            self._broadcast([self._first])

    def receive(self) -> Message:
        """On the others: wait for the next message. Its arrays are valid until the next call."""
        self._broadcast([self._first])
        words = self._words
        kind, num_words = Kind(words[0]), int(words[1])
        if num_words > _FIRST_WORDS:
            words = self._room(num_words)
            words[:_FIRST_WORDS] = self._words
            self._broadcast([torch.from_numpy(words[_FIRST_WORDS:])])
        arrays, start = [], _HEADER_WORDS
        for size, columns in words[2:_HEADER_WORDS].reshape(-1, 2).tolist():
            array = words[start : start + size]
            arrays.append(array.reshape(-1, columns) if columns else array)
            start += size
        return Message(kind, tuple(arrays))

    def _room(self, num_words: int) -> Words:
        return self._words if num_words <= _FIRST_WORDS else np.empty(num_words, np.int32)
