"""The place of one sequence in its grammar: a function of the tokens of its output."""

from collections import deque
from collections.abc import Iterable
from itertools import takewhile

from llguidance import LLMatcher


class RowGrammar:
    """Follows one sequence's output.

    Output is free up to `begins_after`, guided behind it, and ended by a stop token; before the
    grammar begins only if the grammar allows the empty text. Where only one text can follow, its
    tokens are forced: they are decided once, where the text begins, so that they are the same
    whether tokens are sampled one by one or several are appended at once.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        begins_after: tuple[int, ...],
        stop_token_ids: Iterable[int],
        num_tokens: int,
    ) -> None:
        """`matcher` is at the start of the grammar, and belongs to this row from now on. Ids from
        `num_tokens` on are impossible."""
        self.matcher = matcher
        self.is_free = bool(begins_after)
        # Whether the output may end before its grammar begins.
        self.may_end_free = self.is_free and bool(matcher.is_accepting())
        self.has_ended = False
        # The library's reason why the output does not follow the grammar, or None.
        self.error: str | None = None
        # A stop token, if the grammar goes on with these alone: no token is possible then, as they
        # end the output.
        self.stopped_by: int | None = None
        self.forced: deque[int] = deque()
        # The output so far.
        self.token_ids: list[int] = []
        self._begins_after = begins_after
        self._last = deque[int](maxlen=len(begins_after))
        self.stop_token_ids = frozenset(stop_token_ids)
        self._num_tokens = num_tokens
        if not self.is_free:
            self._find_forced()

    @property
    def needs_mask(self) -> bool:
        """Whether the possible tokens have to be computed."""
        return not (self.is_free or self.has_ended or self.forced or self.error is not None)

    def append(self, token_id: int) -> None:
        """Add a token of the output."""
        self.token_ids.append(token_id)
        if self.has_ended or self.error is not None:
            return
        if self.is_free:
            self._append_free(token_id)
        elif token_id in self.stop_token_ids:
            self.has_ended = True
        elif self.matcher.consume_token(token_id):
            if self.forced and self.forced.popleft() != token_id:
                self.forced.clear()
            if not self.forced:
                self._find_forced()
        else:
            self.forced.clear()
            self.error = self.matcher.get_error()

    def _append_free(self, token_id: int) -> None:
        self._last.append(token_id)
        if tuple(self._last) == self._begins_after:
            self.is_free = False
            self._find_forced()

    def _find_forced(self) -> None:
        token_ids = self.matcher.compute_ff_tokens()
        if token_ids:
            valid = self.matcher.validate_tokens(token_ids)
            self.forced.extend(takewhile(self._is_possible, token_ids[:valid]))

    def _is_possible(self, token_id: int) -> bool:
        """Whether the token may be part of the format: a stop token ends it."""
        return token_id < self._num_tokens and token_id not in self.stop_token_ids
