"""One choice's tokens, text and end. Pure."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from gateway_svc.detokenizer import Detokenizer
from gateway_svc.request_stream import Ended, NewTokens
from gateway_svc.stops import StopFinder
from quire.internal.v1 import scheduler_pb2


class MissingTokensError(Exception):
    """The scheduler skipped tokens: a fault of ours, not of the request."""


@dataclass(frozen=True)
class Written:
    """What some tokens added."""

    text: str
    token_ids: tuple[int, ...]
    # Position of token_ids[0] within the choice.
    first_index: int


@dataclass(frozen=True)
class Outcome:
    """How a choice ended: by a stop string, a stop token or, where both are None, by length."""

    num_tokens: int
    num_cached_prompt_tokens: int
    stop_string: str | None = None
    stop_token_id: int | None = None

    @property
    def is_stop(self) -> bool:
        return self.stop_string is not None or self.stop_token_id is not None


class Choice:
    """Takes what the scheduler says of one choice, gives what its client hears."""

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str], stop_token_ids: Set[int]
    ) -> None:
        self.num_tokens = 0
        # The stop string that was found; nothing is written after it.
        self.stop_string: str | None = None
        self._detokenizer = detokenizer
        self._stops = StopFinder(stops)
        # A stop string is looked for after each token, to know how many the choice keeps.
        self._tokens_at_once = 1 if stops else None
        self._stop_token_ids = stop_token_ids

    def write(self, new: NewTokens) -> Written:
        """Tokens known already are dropped, and all that come after a stop string was found.
        MissingTokensError if some are skipped.
        """
        first_index = self.num_tokens
        if self.stop_string is not None:
            return Written("", (), first_index)
        if new.first_index > first_index:
            raise MissingTokensError(f"token {new.first_index} came after {first_index} tokens")
        token_ids = new.token_ids[first_index - new.first_index :]
        size = self._tokens_at_once or max(1, len(token_ids))
        text = ""
        for start in range(0, len(token_ids), size):
            if self.stop_string is not None:
                break
            run = token_ids[start : start + size]
            text += self._pass(self._detokenizer.push(self._with_text(run)))
            self.num_tokens += len(run)
        return Written(text, token_ids[: self.num_tokens - first_index], first_index)

    def end(self, ended: Ended) -> tuple[Written, Outcome]:
        """What was held back, and the outcome. A stop string found before it wins."""
        if self.stop_string is None and ended.num_tokens > self.num_tokens:
            raise MissingTokensError(
                f"{ended.num_tokens} tokens at the end, {self.num_tokens} came"
            )
        num_tokens = min(self.num_tokens, ended.num_tokens)
        text = ""
        if self.stop_string is None:
            text = self._pass(self._detokenizer.flush())
        if self.stop_string is None:
            text += self._stops.flush()
        by_token = self.stop_string is None and ended.reason == scheduler_pb2.END_REASON_STOP_TOKEN
        outcome = Outcome(
            num_tokens,
            ended.num_cached_prompt_tokens,
            self.stop_string,
            ended.stop_token_id if by_token else None,
        )
        return Written(text, (), self.num_tokens), outcome

    def _pass(self, text: str) -> str:
        passed = self._stops.push(text)
        self.stop_string = passed.stop
        return passed.text

    def _with_text(self, token_ids: Sequence[int]) -> Sequence[int]:
        """A stop token ends the choice and is no part of its text."""
        if self._stop_token_ids.isdisjoint(token_ids):
            return token_ids
        return [id_ for id_ in token_ids if id_ not in self._stop_token_ids]
