"""Tokens processed together give the same as tokens processed one by one."""

from collections.abc import Sequence
from itertools import pairwise

import gateway_tokenizers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_svc.generation.choice import Choice, ChoiceUpdate
from gateway_svc.scheduler.events import Ended, NewTokens, TokenLogprobs
from gateway_svc.text.detokenizer import Detokenizer, Vocabulary
from quire.internal.v1 import scheduler_pb2
from quire.service.errors import RequestError

VOCABULARIES = {
    "byte_level": Vocabulary.from_tokenizer(gateway_tokenizers.byte_level()),
    "byte_fallback": Vocabulary.from_tokenizer(gateway_tokenizers.byte_fallback()),
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


def joined(parts: Sequence[ChoiceUpdate]) -> tuple[object, ...]:
    """Join updates as a client does."""
    return (
        "".join(part.text for part in parts),
        [token_id for part in parts for token_id in part.token_ids],
        [logprobs for part in parts for logprobs in part.logprobs],
        parts[-1].end if parts else None,
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
def test_batches_give_the_same_as_single_tokens(
    name: str, text: str, noise: list[int], stops: list[str], cuts: list[int], next_index: int
) -> None:
    """Compare the text and the stop string after every batch, and the end."""
    text_ids = VOCABULARIES[name].tokenizer.encode(text, add_special_tokens=False).ids
    ids = [*text_ids, *noise]
    next_index = min(next_index, len(ids))
    one_by_one, together = (choice_of(name, stops, next_index) for _ in range(2))
    for begin, end in pairwise([0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]):
        tokens = [one_by_one.process([new_tokens(ids, at, at + 1)]) for at in range(begin, end)]
        batch = together.process([new_tokens(ids, begin, end)])
        assert joined([batch]) == joined(tokens or [batch])
        assert together.num_tokens == one_by_one.num_tokens
        assert together.stop_string == one_by_one.stop_string
    if together.num_tokens >= next_index:
        last = end_at(together.num_tokens)
        assert together.process([last]) == one_by_one.process([last])
        assert together.num_tokens == one_by_one.num_tokens
    else:
        with pytest.raises(RequestError):
            together.process([end_at(together.num_tokens)])


def test_a_stop_string_inside_a_batch_ends_the_choice_at_its_token() -> None:
    vocabulary = VOCABULARIES["byte_level"]
    ids = [vocabulary.tokenizer.token_to_id(letter) for letter in "abcdef"]
    choice = choice_of("byte_level", ["cd"], 0)
    written = choice.process([new_tokens(ids, 0, 6)])
    assert (written.text, written.token_ids) == ("ab", tuple(ids[:4]))
    assert (choice.stop_string, choice.num_tokens, len(written.logprobs)) == ("cd", 4, 4)


def test_a_batch_without_stop_strings_is_decoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert choice.process([new_tokens(ids, 0, 200)]).text == "a" * 200
    assert num_decodings == 2
