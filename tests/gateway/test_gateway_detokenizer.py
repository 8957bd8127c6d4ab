"""Incremental detokenization against decoding all tokens at once."""

from dataclasses import replace
from itertools import pairwise

import gateway_tokenizers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import Unigram

from gateway_svc.text.detokenizer import Detokenizer, Vocabulary, WholeTexts

VOCABULARIES = {
    "byte_level": Vocabulary.from_tokenizer(gateway_tokenizers.byte_level()),
    "byte_fallback": Vocabulary.from_tokenizer(gateway_tokenizers.byte_fallback()),
    "metaspace": Vocabulary.from_tokenizer(gateway_tokenizers.metaspace()),
}
MOST_IDS = 420
every_vocabulary = pytest.mark.parametrize("name", VOCABULARIES)
# Includes ids beyond every vocabulary.
token_ids = st.lists(st.integers(0, MOST_IDS), max_size=60)


class NoWholeTexts(WholeTexts):
    def __init__(self) -> None:
        super().__init__(gateway_tokenizers.byte_fallback(), ())


def decoded_text(detokenizer: Detokenizer, token_ids: list[int]) -> str:
    return "".join(detokenizer.push([id_]) for id_ in token_ids) + detokenizer.flush()


@every_vocabulary
@given(ids=token_ids, skip=st.booleans())
@settings(max_examples=200, deadline=None)
def test_joined_deltas_equal_decoding_all_at_once(name: str, ids: list[int], skip: bool) -> None:
    vocabulary = VOCABULARIES[name]
    whole = vocabulary.tokenizer.decode(ids, skip_special_tokens=skip)
    assert decoded_text(Detokenizer(vocabulary, skip), ids) == whole


@every_vocabulary
@given(text=st.text(max_size=40))
@settings(max_examples=150, deadline=None)
def test_deltas_of_a_text_never_split_a_character(name: str, text: str) -> None:
    vocabulary = VOCABULARIES[name]
    ids = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    whole = vocabulary.tokenizer.decode(ids)
    detokenizer = Detokenizer(vocabulary)
    sent = ""
    for id_ in ids:
        sent += detokenizer.push([id_])
        assert whole.startswith(sent)
    assert sent + detokenizer.flush() == whole


@every_vocabulary
@given(text=st.text("ab cdé日!🙂", min_size=1, max_size=30), cut=st.integers(0, 30))
@settings(max_examples=150, deadline=None)
def test_a_context_keeps_the_space_between_prompt_and_text(name: str, text: str, cut: int) -> None:
    vocabulary = VOCABULARIES[name]
    ids = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    # A prompt ends with a whole character.
    while cut and (cut > len(ids) or ids[cut - 1] in vocabulary.byte_ids):
        cut -= 1
    prompt = vocabulary.decode(ids[:cut])
    if prompt.endswith("\N{REPLACEMENT CHARACTER}"):
        return
    text_after = decoded_text(Detokenizer(vocabulary, context=ids[:cut]), ids[cut:])
    assert prompt + text_after == vocabulary.decode(ids)


def test_a_character_that_begins_in_the_context_is_part_of_the_text() -> None:
    vocabulary = VOCABULARIES["byte_level"]
    # Without merges: one token per byte.
    ids = [vocabulary.tokenizer.token_to_id(character) for character in "ðŁĻĤaæĹ¥"]
    assert vocabulary.decode(ids) == "🙂a日"
    for cut in range(len(ids)):
        detokenizer = Detokenizer(vocabulary, context=ids[:cut])
        pushed = [detokenizer.push([id_]) for id_ in ids[cut:]]
        whole = vocabulary.decode(ids[:cut]).rstrip("\N{REPLACEMENT CHARACTER}")
        assert whole + "".join(pushed) + detokenizer.flush() == "🙂a日"
        # It may remain unfinished.
        other = Detokenizer(vocabulary, context=ids[:cut])
        assert other.push([ids[4]]) + other.push([ids[4]]) == "aa"


@every_vocabulary
@given(
    ids=token_ids,
    cuts=st.lists(st.integers(0, 60), max_size=6),
    skip=st.booleans(),
    context=st.lists(st.integers(0, MOST_IDS), max_size=6),
)
@settings(max_examples=300, deadline=None)
def test_tokens_pushed_together_give_the_text_of_single_pushes(
    name: str, ids: list[int], cuts: list[int], skip: bool, context: list[int]
) -> None:
    one_by_one = Detokenizer(VOCABULARIES[name], skip, context)
    together = Detokenizer(VOCABULARIES[name], skip, context)
    for begin, end in pairwise([0, *sorted(cuts), len(ids)]):
        piece = ids[begin:end]
        assert together.push(piece) == "".join(one_by_one.push([id_]) for id_ in piece)
    assert together.flush() == one_by_one.flush()


@every_vocabulary
@given(ids=token_ids, skip=st.booleans(), context=st.lists(st.integers(0, MOST_IDS), max_size=6))
@settings(max_examples=300, deadline=None)
def test_texts_of_whole_tokens_equal_decoded_ones(
    name: str, ids: list[int], skip: bool, context: list[int]
) -> None:
    vocabulary = VOCABULARIES[name]
    known = Detokenizer(vocabulary, skip, context)
    decoding = Detokenizer(replace(vocabulary, whole_texts=NoWholeTexts()), skip, context)
    for id_ in ids:
        assert known.push([id_]) == decoding.push([id_])
        assert known.held() == decoding.held()
    assert known.flush() == decoding.flush()


def test_whole_texts_are_those_of_tokens_that_join_as_bytes() -> None:
    found = {name: vocabulary.whole_texts for name, vocabulary in VOCABULARIES.items()}
    ids = {
        token: VOCABULARIES["byte_level"].tokenizer.token_to_id(token)
        for token in ("a", "Ġthe", '"', "Ċ", gateway_tokenizers.EOS, "æ", "ÿ")
    }
    assert [found["byte_level"][id_] for id_ in ids.values()] == [
        *("a", " the", '"', "\n", gateway_tokenizers.EOS),
        *(None, None),
    ]
    # Decoders of words and byte tokens look at neighbours.
    for name in ("byte_fallback", "metaspace"):
        assert {found[name][id_] for id_ in VOCABULARIES[name].known_ids} == {None}


def test_unfinished_characters_end_as_the_replacement_character() -> None:
    vocabulary = VOCABULARIES["byte_level"]
    smile = vocabulary.tokenizer.encode("日").ids
    byte_ids = [vocabulary.tokenizer.token_to_id(byte) for byte in "æĹ"]
    assert smile
    detokenizer = Detokenizer(vocabulary)
    assert detokenizer.push(byte_ids[:1]) == ""
    assert detokenizer.push(byte_ids[1:]) == ""
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"


@every_vocabulary
def test_a_token_is_decoded_a_bounded_number_of_times(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = VOCABULARIES[name]
    decoded = 0
    decode = Vocabulary.decode

    def counting(self: Vocabulary, token_ids: list[int]) -> str:
        nonlocal decoded
        decoded += len(token_ids)
        return decode(self, token_ids)

    monkeypatch.setattr(Vocabulary, "decode", counting)
    broken = vocabulary.tokenizer.token_to_id("<0xFF>" if vocabulary.byte_ids else "ÿ")
    letter = vocabulary.tokenizer.token_to_id("a")
    for pattern in ([letter], [broken], [letter, broken]):
        decoded = 0
        ids = pattern * (3000 // len(pattern))
        decoded_text(Detokenizer(vocabulary), ids)
        assert decoded < 20 * len(ids)
        # Tokens of whole characters only when the window moves.
        if pattern == [letter] and name == "byte_level":
            assert decoded < len(ids)


def test_ids_without_a_token_have_no_text() -> None:
    tokenizer: Tokenizer = VOCABULARIES["byte_level"].tokenizer
    assert tokenizer.id_to_token(MOST_IDS) is None
    assert decoded_text(Detokenizer(VOCABULARIES["byte_level"]), [MOST_IDS]) == ""


def test_tokens_of_the_same_text_are_all_shown() -> None:
    tokenizer = Tokenizer(Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0), ("a", -3.0)], 0))
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    assert decoded_text(Detokenizer(vocabulary), [1, 2, 3]) == tokenizer.decode([1, 2, 3])
