"""Tokens that come together are written as if they came one by one."""

from collections.abc import Sequence
from itertools import pairwise

import gateway_tokenizers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_svc.choice import Choice, Written
from gateway_svc.detokenizer import Detokenizer, Vocabulary
from gateway_svc.logprobs import TokenLogprobs
from gateway_svc.request_stream import Ended, NewTokens
from quire.internal.v1 import scheduler_pb2
from quire.service.errors import RequestError

VOCABULARIES = {
    "byte_level": Vocabulary.of(gateway_tokenizers.byte_level()),
    "byte_fallback": Vocabulary.of(gateway_tokenizers.byte_fallback()),
}
STOP_TOKEN = 40
stop_strings = st.lists(st.text("abc !日é", min_size=1, max_size=3), max_size=3, unique=True)


def choice_of(name: str, stops: Sequence[str], next_index: int) -> Choice:
    return Choice(0, Detokenizer(VOCABULARIES[name]), stops, frozenset({STOP_TOKEN}), next_index)


def new_tokens(token_ids: Sequence[int], begin: int, end: int) -> NewTokens:
    logprobs = tuple(TokenLogprobs(bytes([index])) for index in range(begin, end))
    return NewTokens(0, begin, tuple(token_ids[begin:end]), logprobs)


def end_at(num_tokens: int) -> Ended:
    return Ended(0, scheduler_pb2.END_REASON_LENGTH, None, num_tokens, 0)


def joined(parts: Sequence[Written]) -> tuple[object, ...]:
    """What a client makes of them."""
    return (
        "".join(part.text for part in parts),
        [token_id for part in parts for token_id in part.token_ids],
        [told for part in parts for told in part.logprobs],
        parts[-1].outcome if parts else None,
    )


@pytest.mark.parametrize("name", VOCABULARIES)
@given(
    text=st.text("abc !日é🙂", max_size=30),
    noise=st.lists(st.integers(0, 300), max_size=30),
    stops=stop_strings,
    cuts=st.lists(st.integers(0, 60), max_size=5),
    next_index=st.sampled_from([0, 0, 1, 7, 30]),
)
@settings(max_examples=300, deadline=None)
def test_pieces_give_what_tokens_give(
    name: str, text: str, noise: list[int], stops: list[str], cuts: list[int], next_index: int
) -> None:
    """At every cut: the text, where a stop string was found, and in the end the outcome."""
    text_ids = VOCABULARIES[name].tokenizer.encode(text, add_special_tokens=False).ids
    ids = [*text_ids, *noise]
    next_index = min(next_index, len(ids))
    one_by_one, together = (choice_of(name, stops, next_index) for _ in range(2))
    for begin, end in pairwise([0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]):
        tokens = [one_by_one.take([new_tokens(ids, at, at + 1)]) for at in range(begin, end)]
        piece = together.take([new_tokens(ids, begin, end)])
        assert joined([piece]) == joined(tokens or [piece])
        assert together.num_tokens == one_by_one.num_tokens
        assert together.stop_string == one_by_one.stop_string
    if together.num_tokens >= next_index:
        last = end_at(together.num_tokens)
        assert together.take([last]) == one_by_one.take([last])
        assert together.num_tokens == one_by_one.num_tokens
    else:
        with pytest.raises(RequestError):
            together.take([end_at(together.num_tokens)])


def test_a_stop_string_inside_a_piece_ends_the_choice_at_its_own_token() -> None:
    vocabulary = VOCABULARIES["byte_level"]
    ids = [vocabulary.tokenizer.token_to_id(letter) for letter in "abcdef"]
    choice = choice_of("byte_level", ["cd"], 0)
    written = choice.take([new_tokens(ids, 0, 6)])
    assert (written.text, written.token_ids) == ("ab", tuple(ids[:4]))
    assert (choice.stop_string, choice.num_tokens, len(written.logprobs)) == ("cd", 4, 4)


def test_a_piece_without_stop_strings_is_decoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = VOCABULARIES["byte_level"]
    choice = choice_of("byte_level", [], 0)
    num_decodings = 0
    decode = Vocabulary.decode

    def counting(self: Vocabulary, token_ids: Sequence[int]) -> str:
        nonlocal num_decodings
        num_decodings += 1
        return decode(self, token_ids)

    monkeypatch.setattr(Vocabulary, "decode", counting)
    ids = [vocabulary.tokenizer.token_to_id("a")] * 200
    assert choice.take([new_tokens(ids, 0, 200)]).text == "a" * 200
    assert num_decodings == 2
