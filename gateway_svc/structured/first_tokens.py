"""The tokens with which an output of a format may begin."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class FirstTokens:
    """As workers begin: where only one text can follow, its first token is the only one."""

    bits: bytes  # one per token, the lowest first
    forced: int | None
    may_end: bool  # the output may be empty

    @classmethod
    def read(cls, mask: bytes, end_id: int, forced: Sequence[int]) -> Self:
        """`mask` has one bit per token, and `end_id` for the end."""
        at, bit = end_id // 8, 1 << end_id % 8
        bits = mask[:at] + bytes([mask[at] & (bit - 1)])
        return cls(bits, forced[0] if forced else None, bool(mask[at] & bit))

    @property
    def example(self) -> int | None:
        """One of them; None if the output can only be empty."""
        if self.forced is not None:
            return self.forced
        number = int.from_bytes(self.bits, "little")
        return (number & -number).bit_length() - 1 if number else None

    def any_of(self, token_ids: Collection[int], stop_token_ids: Collection[int]) -> bool:
        """Whether any of the tokens is possible. A stop token is no part of a format."""
        if self._is_forced(stop_token_ids):
            return self.forced in token_ids
        return any(self._has(token_id) for token_id in token_ids if token_id not in stop_token_ids)

    def any_without(self, excluded: Collection[int], stop_token_ids: Collection[int]) -> bool:
        """Whether any token is possible if these are not."""
        if self._is_forced(stop_token_ids):
            return self.forced not in excluded
        num_possible = int.from_bytes(self.bits, "little").bit_count()
        return num_possible > sum(map(self._has, {*excluded, *stop_token_ids}))

    def _is_forced(self, stop_token_ids: Collection[int]) -> bool:
        return self.forced is not None and self.forced not in stop_token_ids

    def _has(self, token_id: int) -> bool:
        at, bit = divmod(token_id, 8)
        return at < len(self.bits) and bool(self.bits[at] >> bit & 1)
