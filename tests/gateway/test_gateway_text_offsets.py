"""The text offsets of a prompt's tokens."""

from itertools import pairwise

from gateway_tokenizers import BOS, byte_fallback, byte_level
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_svc.text.detokenizer import Detokenizer, TokenTexts, Vocabulary
from gateway_svc.text.text_offsets import TextOffsets, text_offsets

VOCABULARIES = [Vocabulary.from_tokenizer(one()) for one in (byte_level, byte_fallback)]


def test_offsets_are_those_of_the_tokens_texts():
    tokenizer = byte_level()
    text = "The quick brown fox jumps"
    ids = tokenizer.encode(text).ids
    offsets = text_offsets(Vocabulary.from_tokenizer(tokenizer), ids, text)
    texts = [tokenizer.decode([id_]) for id_ in ids]
    assert offsets == [len("".join(texts[:at])) for at in range(len(ids))]


def test_parts_of_a_character_have_its_offset():
    tokenizer = byte_level(258)
    text = "a🙂b"
    ids = tokenizer.encode(text).ids
    assert len(ids) == 6
    offsets = text_offsets(Vocabulary.from_tokenizer(tokenizer), ids, text)
    assert offsets == [0, 1, 1, 1, 1, 2]


def test_added_special_tokens_have_no_characters():
    tokenizer = byte_fallback()
    ids = [tokenizer.token_to_id(BOS), *tokenizer.encode("ab cd", add_special_tokens=False).ids]
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    text = vocabulary.decode(ids).removeprefix(BOS)
    offsets = text_offsets(vocabulary, ids, text)
    assert offsets[:2] == [0, 0]
    assert offsets == sorted(offsets)
    assert max(offsets) < len(text)


def test_special_tokens_that_contain_the_text_are_not_it():
    tokenizer = byte_fallback()
    ids = [tokenizer.token_to_id(token) for token in (BOS, "a")]
    assert text_offsets(Vocabulary.from_tokenizer(tokenizer), ids, "a") == [0, 0]
    tokenizer = byte_level()
    ids = [tokenizer.token_to_id(token) for token in (BOS, "s", "s")]
    assert text_offsets(Vocabulary.from_tokenizer(tokenizer), ids, "ss") == [0, 0, 1]


def test_tokens_after_byte_tokens_have_their_own_offset():
    """The text of a run of byte tokens is held back until the token behind it."""
    tokenizer = byte_fallback()
    ids = tokenizer.encode("abñ🙂 a", add_special_tokens=False).ids
    assert [tokenizer.id_to_token(id_)[0] for id_ in ids] == [*"▁<<<<<<▁"]
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    text = vocabulary.decode(ids)
    assert text == "abñ🙂 a"
    assert text_offsets(vocabulary, ids, text) == [0, 2, 2, 3, 3, 3, 3, 4]


@given(
    vocabulary=st.sampled_from(VOCABULARIES),
    ids=st.lists(st.integers(0, 420), max_size=40),
    skip=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_offsets_cut_a_text_into_the_texts_of_its_tokens(
    vocabulary: Vocabulary, ids: list[int], skip: bool
) -> None:
    texts = TokenTexts(vocabulary)
    context = vocabulary.tokenizer.encode("a").ids
    detokenizer = Detokenizer(vocabulary, skip, context)
    counter = TextOffsets(detokenizer, 7)
    pushed = [counter.push_one(id_) for id_ in ids]
    text = "".join(piece for _, piece in pushed) + detokenizer.flush()
    offsets = [offset - 7 for offset, _ in pushed] + [len(text)]
    assert offsets == sorted(offsets)
    for id_, (begin, end) in zip(ids, pairwise(offsets), strict=True):
        whole = "\N{REPLACEMENT CHARACTER}" not in texts[id_] + text[begin:end]
        if whole and id_ not in vocabulary.byte_ids and detokenizer.shows(id_):
            assert text[begin:end] == texts[id_]
