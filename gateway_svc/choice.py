"""One choice's tokens, text and end. Pure."""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from gateway_svc.detokenizer import Detokenizer
from gateway_svc.logprobs import TokenLogprobs
from gateway_svc.request_stream import Ended, NewTokens
from gateway_svc.stops import StopFinder
from quire.internal.v1 import scheduler_pb2
from quire.service.errors import invalid


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
    # One per entry of token_ids, where they were asked for.
    logprobs: tuple[TokenLogprobs, ...] = ()


class Choice:
    """Takes what the scheduler says of one choice, gives what its client hears.

    The text that has been given out with a token depends on the tokens up to it alone. So a client
    that has the first tokens of a choice is given the text behind theirs.
    """

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        stop_token_ids: Set[int],
        next_index: int = 0,
    ) -> None:
        """Its client has the tokens before `next_index`, with their text."""
        self.index = index
        self.num_tokens = 0
        # The stop string that was found; nothing is written after it.
        self.stop_string: str | None = None
        # How it ended; None until it has.
        self.outcome: Outcome | None = None
        self._detokenizer = detokenizer
        self._stops = StopFinder(stops)
        self._has_stops = bool(stops)
        self._stop_token_ids = stop_token_ids
        self._next_index = next_index

    def take(self, events: Iterable[NewTokens | Ended]) -> Written:
        """Events of this choice in their order, without gaps, the end as the last one.

        Tokens that come after a stop string was found are dropped. RequestError if it ends before
        `next_index`.
        """
        num_before = self.num_tokens
        first_index = max(num_before, self._next_index)
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        end = None
        for event in events:
            if isinstance(event, Ended):
                end = event
            else:
                token_ids += event.token_ids
                logprobs += event.logprobs
        texts = self._write_new(token_ids)
        # What was written, before an end that may keep less of it.
        new = slice(first_index - num_before, self.num_tokens - num_before)
        if end is not None:
            texts.append(self._end(end))
        return Written(
            self.index,
            "".join(texts),
            tuple(token_ids[new]),
            first_index,
            self.outcome,
            tuple(logprobs[new]),
        )

    def _write_new(self, token_ids: Sequence[int]) -> list[str]:
        """The texts that go out, up to a stop string."""
        texts: list[str] = []
        for run in self._runs(token_ids):
            if self.stop_string is not None:
                break
            text = self._write(run)
            if self.num_tokens > self._next_index:
                texts.append(text)
        return texts

    def _runs(self, token_ids: Sequence[int]) -> Iterator[Sequence[int]]:
        """The tokens, cut where their text has to be known: between those that the client has and
        the others, and behind each one where a stop string may end there.
        """
        if self._has_stops:
            yield from zip(token_ids)
            return
        num_known = max(0, self._next_index - self.num_tokens)
        yield from filter(None, (token_ids[:num_known], token_ids[num_known:]))

    def _write(self, run: Sequence[int]) -> str:
        """Counts tokens, and gives the text that may go out with the last of them. A stop token
        ends the choice and is no part of its text.
        """
        self.num_tokens += len(run)
        written = [token_id for token_id in run if token_id not in self._stop_token_ids]
        return self._pass(self._detokenizer.push_all(written))

    def _end(self, ended: Ended) -> str:
        """What was held back. A stop string found before, or in it, wins over the told reason."""
        text = ""
        if self.stop_string is None:
            text = self._pass(self._detokenizer.flush())
        if self.stop_string is None:
            text += self._stops.flush()
        self.num_tokens = min(self.num_tokens, ended.num_tokens)
        if self.num_tokens < self._next_index:
            raise invalid(
                f"next_token_indices[{self.index}]",
                "TOKEN_INDEX_PAST_END",
                f"is {self._next_index}; the choice has ended with {self.num_tokens} tokens",
            )
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
