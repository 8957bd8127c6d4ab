"""One choice's tokens, text and end. Pure."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from gateway_svc.detokenizer import Detokenizer
from gateway_svc.request_stream import Ended, NewTokens
from gateway_svc.stops import StopFinder
from quire.internal.v1 import scheduler_pb2


class MissingTokensError(Exception):
    """The scheduler skipped tokens: a fault of ours, not of the request."""


@dataclass(frozen=True)
class Outcome:
    """How a choice ended: by a stop string, a stop token or, where both are None, by length."""

    num_cached_prompt_tokens: int
    stop_string: str | None = None
    stop_token_id: int | None = None

    @property
    def is_stop(self) -> bool:
        return self.stop_string is not None or self.stop_token_id is not None


@dataclass(frozen=True)
class Written:
    """What some events added to a choice."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    # Position of token_ids[0] within the choice.
    first_index: int
    # With the last of them.
    outcome: Outcome | None


class Choice:
    """Takes what the scheduler says of one choice, gives what its client hears."""

    def __init__(
        self, index: int, detokenizer: Detokenizer, stops: Sequence[str], stop_token_ids: Set[int]
    ) -> None:
        self.index = index
        self.num_tokens = 0
        # The stop string that was found; nothing is written after it.
        self.stop_string: str | None = None
        # How it ended; None until it has.
        self.outcome: Outcome | None = None
        self._detokenizer = detokenizer
        self._stops = StopFinder(stops)
        # A stop string is looked for after each token, to know how many the choice keeps.
        self._tokens_at_once = 1 if stops else None
        self._stop_token_ids = stop_token_ids

    def take(self, events: Iterable[NewTokens | Ended]) -> Written:
        """Events of this choice in their order, the end as the last one.

        Tokens known already are dropped, and all that come after a stop string was found.
        MissingTokensError if some are skipped.
        """
        first_index = self.num_tokens
        texts: list[str] = []
        token_ids: list[int] = []
        for event in events:
            if isinstance(event, NewTokens):
                new = self._unknown(event)
                texts.append(self._write(new))
                token_ids += new[: self.num_tokens - first_index - len(token_ids)]
            else:
                texts.append(self._end(event))
        return Written(self.index, "".join(texts), tuple(token_ids), first_index, self.outcome)

    def _unknown(self, new: NewTokens) -> tuple[int, ...]:
        if self.stop_string is not None:
            return ()
        if new.first_index > self.num_tokens:
            raise MissingTokensError(
                f"choice {self.index}: token {new.first_index} came after {self.num_tokens} tokens"
            )
        return new.token_ids[self.num_tokens - new.first_index :]

    def _write(self, token_ids: Sequence[int]) -> str:
        """Counts the tokens up to a stop string, and gives the text that may go out."""
        size = self._tokens_at_once or max(1, len(token_ids))
        text = ""
        for start in range(0, len(token_ids), size):
            if self.stop_string is not None:
                break
            run = token_ids[start : start + size]
            text += self._pass(self._detokenizer.push(self._with_text(run)))
            self.num_tokens += len(run)
        return text

    def _end(self, ended: Ended) -> str:
        """What was held back. A stop string found before, or in it, wins over the told reason."""
        if self.stop_string is None and ended.num_tokens > self.num_tokens:
            raise MissingTokensError(
                f"choice {self.index}: {ended.num_tokens} tokens at the end, {self.num_tokens} came"
            )
        text = ""
        if self.stop_string is None:
            text = self._pass(self._detokenizer.flush())
        if self.stop_string is None:
            text += self._stops.flush()
        self.num_tokens = min(self.num_tokens, ended.num_tokens)
        by_token = self.stop_string is None and ended.reason == scheduler_pb2.END_REASON_STOP_TOKEN
        self.outcome = Outcome(
            ended.num_cached_prompt_tokens,
            self.stop_string,
            ended.stop_token_id if by_token else None,
        )
        return text

    def _pass(self, text: str) -> str:
        passed = self._stops.push(text)
        self.stop_string = passed.stop
        return passed.text

    def _with_text(self, token_ids: Sequence[int]) -> Sequence[int]:
        """A stop token ends the choice and is no part of its text."""
        if self._stop_token_ids.isdisjoint(token_ids):
            return token_ids
        return [id_ for id_ in token_ids if id_ not in self._stop_token_ids]
