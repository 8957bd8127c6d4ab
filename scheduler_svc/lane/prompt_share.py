"""Limits the tokens of prompts in a step that also decodes, so that the step stays short.

All rows of a step get their tokens at its end. Where a processor computes some hundred tokens per
second, a full token budget of prompts would stop every stream for seconds. Smaller steps cost a few
per cent of the throughput, because the weights are read more often.
"""

from typing import Final

UNLIMITED: Final = 2**31
# Prompts are always computed, however long a step takes.
_LEAST_TOKENS: Final = 32
# The weight of what was known, against that of the step that has completed.
_DECAY: Final = 0.5
# Steps in a row with decodes and prompts, of which the next one has no prompts: what decodes take
# changes with their number, and is measured without prompts only.
_MAX_MIXED_STEPS: Final = 16


class PromptShare:
    """The tokens of prompts that a step of one lane may have beside decodes."""

    def __init__(self, max_step_s: float) -> None:
        """A step shall take `max_step_s`, or twice as long as one that only decodes; 0: any
        time."""
        self._max_step_s = max_step_s
        self._decode_s = 0.0
        # Since `_decode_s` was measured; without steps of which no stream can notice the time.
        self._num_mixed_steps = 0
        # Decayed sums over steps with prompts, without the time of their decodes.
        self._num_tokens = 0.0
        self._seconds = 0.0

    def decoded(self, step_s: float) -> None:
        """Record the duration of a step without prompts, of one round."""
        self._decode_s = step_s
        self._num_mixed_steps = 0

    def prefilled(self, num_tokens: int, decodes: bool, step_s: float) -> None:
        """Record a step that has computed `num_tokens` of prompts, perhaps beside decodes."""
        self._num_mixed_steps += decodes and step_s > self._max_step_s / 2
        if num_tokens < _LEAST_TOKENS:
            return
        seconds = step_s - self._decode_s if decodes else step_s
        self._num_tokens = _DECAY * self._num_tokens + num_tokens
        self._seconds = _DECAY * self._seconds + max(0.0, seconds)

    @property
    def max_tokens(self) -> int:
        if not (self._max_step_s and self._seconds):
            return UNLIMITED
        if self._num_mixed_steps >= _MAX_MIXED_STEPS:
            return 0
        seconds = max(self._max_step_s - self._decode_s, self._decode_s)
        num_tokens = seconds * self._num_tokens / self._seconds
        return int(min(max(num_tokens, _LEAST_TOKENS), UNLIMITED))
