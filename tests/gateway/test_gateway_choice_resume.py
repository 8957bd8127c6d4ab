"""Choices resumed at any token: texts, tokens and log-probabilities add up."""

from collections.abc import Sequence
from itertools import pairwise

import gateway_tokenizers
import pytest
from gateway_fake_scheduler import Entry, pack
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway_svc.generation.choice import Choice, ChoiceUpdate
from gateway_svc.scheduler.events import Ended, NewTokens, TokenLogprobs
from gateway_svc.text.detokenizer import Detokenizer, Vocabulary
from quire.internal.v1 import scheduler_pb2
from quire.service.errors import RequestError

VOCABULARIES = {
    "byte_level": Vocabulary.from_tokenizer(gateway_tokenizers.byte_level()),
    "byte_fallback": Vocabulary.from_tokenizer(gateway_tokenizers.byte_fallback()),
    "metaspace": Vocabulary.from_tokenizer(gateway_tokenizers.metaspace()),
}
every_vocabulary = pytest.mark.parametrize("name", VOCABULARIES)
LETTERS = "ab cdé日!🙂"
some_text = st.text(LETTERS, max_size=30)
stop_strings = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3)
cuts = st.lists(st.integers(0, 200), max_size=8)
MOST_IDS = 420


def choice(
    vocabulary: Vocabulary,
    stops: Sequence[str],
    skip: bool,
    context: Sequence[int],
    stop_token_ids: Sequence[int] = (),
    min_tokens: int = 0,
    next_index: int = 0,
) -> Choice:
    detokenizer = Detokenizer(vocabulary, skip, context)
    stop_ids = frozenset(stop_token_ids)
    return Choice(0, detokenizer, stops, stop_ids, next_index, min_tokens=min_tokens)


def end(num_tokens: int) -> Ended:
    return Ended(0, scheduler_pb2.END_REASON_LENGTH, None, num_tokens, 0)


def logprobs_of(ids: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    """Distinct log-probabilities for every token and index."""
    return tuple(TokenLogprobs(pack([Entry(id_, -at, 1)])) for at, id_ in enumerate(ids))


def updates(choice: Choice, ids: Sequence[int], cuts: Sequence[int]) -> list[ChoiceUpdate]:
    """Updates for ids processed in pieces, and for the end."""
    at = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    logprobs = logprobs_of(ids)
    pieces = [NewTokens(0, a, tuple(ids[a:b]), logprobs[a:b]) for a, b in pairwise(at)]
    parts = [choice.process([piece]) for piece in pieces]
    # The scheduler ends a choice at its stop string.
    return [*parts, choice.process([end(choice.num_tokens)])]


def text_of(parts: Sequence[ChoiceUpdate]) -> str:
    return "".join(part.text for part in parts)


def check_every_cut(
    vocabulary: Vocabulary,
    ids: Sequence[int],
    pieces: tuple[Sequence[int], Sequence[int]],
    stops: Sequence[str],
    skip: bool,
    context: Sequence[int],
    stop_token_ids: Sequence[int],
    min_tokens: int = 0,
) -> None:
    """The updates of one stream up to any cut, and those of another gateway after it, give the
    whole text and all tokens.
    """
    args = (vocabulary, stops, skip, context, stop_token_ids, min_tokens)
    whole = choice(*args)
    parts = updates(whole, ids, pieces[0])
    text = text_of(parts)
    assert text == text_of(updates(choice(*args), ids, pieces[1]))
    kept = [id_ for part in parts for id_ in part.token_ids]
    logprobs = logprobs_of(kept)
    assert sum((part.logprobs for part in parts), ()) == logprobs
    for num_parts in range(len(parts)):
        before = parts[:num_parts]
        next_index = sum(len(part.token_ids) for part in before)
        other = choice(*args, next_index=next_index)
        after = updates(other, ids, pieces[1])
        assert text_of(before) + text_of(after) == text
        assert [id_ for part in after for id_ in part.token_ids] == kept[next_index:]
        assert sum((part.logprobs for part in after), ()) == logprobs[next_index:]
        assert all(part.first_index >= next_index for part in after)
        assert other.end == whole.end
        assert other.num_tokens == whole.num_tokens


@every_vocabulary
@given(
    text=some_text,
    prompt=st.text(LETTERS, max_size=5),
    pieces=st.tuples(cuts, cuts),
    stops=stop_strings,
    skip=st.booleans(),
    min_tokens=st.integers(0, 12),
)
@settings(max_examples=150, deadline=None)
def test_a_text_is_resumed_at_every_cut(
    name: str,
    text: str,
    prompt: str,
    pieces: tuple[list[int], list[int]],
    stops: list[str],
    skip: bool,
    min_tokens: int,
) -> None:
    vocabulary = VOCABULARIES[name]
    ids = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    context = vocabulary.tokenizer.encode(prompt, add_special_tokens=False).ids
    check_every_cut(vocabulary, ids, pieces, stops, skip, context, (), min_tokens)


@every_vocabulary
@given(
    ids=st.lists(st.integers(0, MOST_IDS), max_size=40),
    pieces=st.tuples(cuts, cuts),
    stops=st.lists(st.sampled_from(["a", "\N{REPLACEMENT CHARACTER}", "</s>", "é日"]), max_size=2),
    skip=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, MOST_IDS), max_size=2),
)
@settings(max_examples=150, deadline=None)
def test_any_tokens_are_resumed_at_every_cut(
    name: str,
    ids: list[int],
    pieces: tuple[list[int], list[int]],
    stops: list[str],
    skip: bool,
    stop_token_ids: list[int],
) -> None:
    check_every_cut(VOCABULARIES[name], ids, pieces, stops, skip, ids[::-1], stop_token_ids)


@every_vocabulary
def test_every_cut_of_one_text(name: str) -> None:
    vocabulary = VOCABULARIES[name]
    text = "ab 日🙂 cd!é STOP and 🙂🙂"
    ids = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    every_token = range(len(ids) + 1)
    for stops in ([], ["STOP"], ["🙂 c"], ["nowhere", "🙂🙂"]):
        for pieces in ((every_token, []), ([], every_token)):
            check_every_cut(vocabulary, ids, pieces, stops, True, [], [])


@every_vocabulary
@given(ids=st.lists(st.integers(0, MOST_IDS), max_size=60))
@example(ids=[10, 200, 201, 10])
@settings(max_examples=200, deadline=None)
def test_only_the_end_of_a_context_matters(name: str, ids: list[int]) -> None:
    vocabulary = VOCABULARIES[name]
    for skip in (False, True):
        tail = Detokenizer.trim_context(vocabulary, skip, ids)
        assert Detokenizer.trim_context(vocabulary, skip, tail) == tail


@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [(0, ""), (1, ""), (2, "ab"), (3, "ab"), (4, "abab"), (5, "abab"), (6, "ababab")],
)
def test_a_stop_string_ends_after_the_first_tokens(min_tokens: int, text: str) -> None:
    """As in vLLM: it may begin in the text of the first `min_tokens` tokens, and end later."""
    vocabulary = VOCABULARIES["byte_level"]
    ids = [vocabulary.tokenizer.token_to_id(character) for character in "ababab"]
    parts = updates(choice(vocabulary, ["ab"], True, [], (), min_tokens), ids, range(7))
    assert text_of(parts) == text


def test_an_index_past_the_end_fails() -> None:
    vocabulary = VOCABULARIES["byte_level"]
    ids = vocabulary.tokenizer.encode("abc").ids
    writer = choice(vocabulary, [], True, [], next_index=len(ids) + 1)
    [nothing] = [writer.process([NewTokens(0, 0, tuple(ids))])]
    assert (nothing.text, nothing.token_ids) == ("", ())
    with pytest.raises(RequestError) as caught:
        writer.process([end(len(ids))])
    assert str(caught.value).startswith("next_token_indices[0]: ")


def test_a_complete_choice_repeats_its_end() -> None:
    vocabulary = VOCABULARIES["byte_level"]
    ids = vocabulary.tokenizer.encode("abc").ids
    writer = choice(vocabulary, [], True, [], next_index=len(ids))
    [part] = [writer.process([NewTokens(0, 0, tuple(ids)), end(len(ids))])]
    assert (part.text, part.token_ids, part.first_index) == ("", (), len(ids))
    assert part.end is not None
