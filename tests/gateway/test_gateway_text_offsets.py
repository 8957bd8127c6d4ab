"""The text offsets of a prompt's tokens."""

from gateway_tokenizers import BOS, byte_fallback, byte_level

from gateway_svc.text.detokenizer import Vocabulary
from gateway_svc.text.text_offsets import text_offsets


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
