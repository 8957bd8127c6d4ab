"""Compares a stream with its reference output: token by token, character by character."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest

from benchmarks.chaos.logprobs import same_logprobs
from quire.client.outputs import (
    CompletionDelta,
    CompletionOutput,
    RequestDelta,
    RequestOutput,
    TokenLogprobs,
    Usage,
)


class Verdict(StrEnum):
    """Kinds of error of a stream."""

    LOST = "lost"
    REPEATED = "repeated"
    CHANGED = "changed"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    verdict: Verdict
    # The position, what was received and what was expected.
    message: str


class Comparison:
    """Compares the messages of one stream as they arrive; `findings` collects the errors."""

    def __init__(self, expected: RequestOutput, logprob_tolerance: float = 0.0) -> None:
        self.findings: list[Finding] = []
        self._expected = expected.usage
        self._choices = [
            _Choice(output, logprob_tolerance, self.findings) for output in expected.outputs
        ]
        self._usage: Usage | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens received, over all choices."""
        return sum(choice.num_tokens for choice in self._choices)

    def take(self, message: RequestDelta) -> None:
        if self._usage is not None:
            self._find(Verdict.REPEATED, "a message after the last one")
        for delta in message.outputs:
            if delta.index < len(self._choices):
                self._choices[delta.index].take(delta)
            else:
                self._find(Verdict.CHANGED, f"choice {delta.index}: there is no such choice")
        self._usage = message.usage or self._usage

    def fail(self, why: str) -> None:
        """Record that the stream ended with an error."""
        self._find(Verdict.FAILED, why)

    def end(self) -> None:
        """Check that the stream is complete; call it when the server has ended the stream."""
        for choice in self._choices:
            choice.end()
        if self._usage is None:
            self._find(Verdict.LOST, "usage")
            return
        for what in ("prompt_tokens", "completion_tokens"):
            expected, counted = getattr(self._expected, what), getattr(self._usage, what)
            if expected != counted:
                self._find(Verdict.CHANGED, f"usage: {what} {counted}, expected {expected}")

    def _find(self, verdict: Verdict, message: str) -> None:
        self.findings.append(Finding(verdict, message))


class _Choice:
    """One choice. Received: [0, num_tokens) of the expected tokens, [0, num_chars) of the text."""

    def __init__(
        self, expected: CompletionOutput, logprob_tolerance: float, findings: list[Finding]
    ) -> None:
        self.num_tokens = 0
        self._expected = expected
        self._logprob_tolerance = logprob_tolerance
        self._findings = findings
        self._num_chars = 0
        self._has_ended = False

    def take(self, delta: CompletionDelta) -> None:
        if self._has_ended:
            self._find(Verdict.REPEATED, "a message after the choice's end")
        self._take_tokens(delta.first_token_index, delta.token_ids)
        self._take_logprobs(delta.first_token_index, len(delta.token_ids), delta.logprobs)
        self._take_text(delta.text)
        if delta.finish_reason is not None:
            self._has_ended = True
            self._compare("finish_reason", self._expected.finish_reason, delta.finish_reason)
            self._compare("stop_reason", self._expected.stop_reason, delta.stop_reason)

    def end(self) -> None:
        expected = self._expected
        if not self._has_ended:
            self._find(Verdict.LOST, "the end")
        if self.num_tokens < len(expected.token_ids):
            self._find(Verdict.LOST, f"tokens from {self.num_tokens} of {len(expected.token_ids)}")
        if self._num_chars < len(expected.text):
            self._find(Verdict.LOST, f"text from {self._num_chars} of {len(expected.text)}")

    def _take_tokens(self, first: int, token_ids: Sequence[int]) -> None:
        """Compare tokens at the index that the message states, also after a gap or an overlap."""
        if not token_ids:
            return
        if first > self.num_tokens:
            self._find(Verdict.LOST, f"tokens {self.num_tokens} to {first - 1}")
        elif first < self.num_tokens:
            self._find(Verdict.REPEATED, f"tokens from {first}, {self.num_tokens} were received")
        expected = self._expected.token_ids[first : first + len(token_ids)]
        for index, wanted, received in _differences(first, expected, token_ids):
            self._find(Verdict.CHANGED, f"token {index}: {received}, expected {wanted}")
        self.num_tokens = first + len(token_ids)

    def _take_logprobs(self, first: int, count: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Report only the first difference: after a shift all later ones differ, too."""
        expected = self._expected.logprobs[first : first + count]
        for index, (wanted, received) in enumerate(zip_longest(expected, logprobs), start=first):
            if (
                wanted is None
                or received is None
                or not same_logprobs(wanted, received, self._logprob_tolerance)
            ):
                message = f"log-probabilities of token {index}: {received}, expected {wanted}"
                self._find(Verdict.CHANGED, message)
                return

    def _take_text(self, text: str) -> None:
        start = self._num_chars
        self._num_chars += len(text)
        expected = self._expected.text[start : self._num_chars]
        if text != expected:
            self._find(Verdict.CHANGED, f"text from {start}: {text!r}, expected {expected!r}")

    def _compare(self, what: str, expected: object, received: object) -> None:
        if expected != received:
            self._find(Verdict.CHANGED, f"{what}: {received!r}, expected {expected!r}")

    def _find(self, verdict: Verdict, message: str) -> None:
        self._findings.append(Finding(verdict, f"choice {self._expected.index}: {message}"))


def _differences(
    first: int, expected: Sequence[int], received: Sequence[int]
) -> Iterator[tuple[int, int | None, int]]:
    """Yield the first difference, if there is one, as index, expected and received token."""
    for offset, token in enumerate(received):
        wanted = expected[offset] if offset < len(expected) else None
        if wanted != token:
            yield first + offset, wanted, token
            return
