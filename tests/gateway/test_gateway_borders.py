"""Text that is cut between any two tokens and goes on elsewhere."""

from collections.abc import Sequence
from itertools import pairwise

import gateway_tokenizers
import pytest
from gateway_fake_scheduler import Entry, pack
from hypothesis import example, given, settings
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
    "metaspace": Vocabulary.of(gateway_tokenizers.metaspace()),
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
    next_index: int = 0,
) -> Choice:
    detokenizer = Detokenizer(vocabulary, skip, context)
    return Choice(0, detokenizer, stops, frozenset(stop_token_ids), next_index)


def end(num_tokens: int) -> Ended:
    return Ended(0, scheduler_pb2.END_REASON_LENGTH, None, num_tokens, 0)


def logprobs_of(ids: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    """Of each token its own; those of another index are others."""
    return tuple(TokenLogprobs(pack([Entry(id_, -at, 1)])) for at, id_ in enumerate(ids))


def written(writer: Choice, ids: Sequence[int], borders: Sequence[int]) -> list[Written]:
    """Of ids that come in pieces, and then an end."""
    at = sorted({0, len(ids), *(border % (len(ids) + 1) for border in borders)})
    told = logprobs_of(ids)
    pieces = [NewTokens(0, a, tuple(ids[a:b]), told[a:b]) for a, b in pairwise(at)]
    parts = [writer.take([piece]) for piece in pieces]
    # The scheduler ends a choice where its stop string was found.
    return [*parts, writer.take([end(writer.num_tokens)])]


def text_of(parts: Sequence[Written]) -> str:
    return "".join(part.text for part in parts)


def check_every_cut(
    vocabulary: Vocabulary,
    ids: Sequence[int],
    pieces: tuple[Sequence[int], Sequence[int]],
    stops: Sequence[str],
    skip: bool,
    context: Sequence[int],
    stop_token_ids: Sequence[int],
) -> None:
    """A client that has the parts of one stream up to any of its borders has, with what another
    gateway gives it then, the whole text and all tokens.
    """
    args = (vocabulary, stops, skip, context, stop_token_ids)
    whole = choice(*args)
    parts = written(whole, ids, pieces[0])
    text = text_of(parts)
    assert text == text_of(written(choice(*args), ids, pieces[1]))
    kept = [id_ for part in parts for id_ in part.token_ids]
    told = logprobs_of(kept)
    assert sum((part.logprobs for part in parts), ()) == told
    for num_parts in range(len(parts)):
        before = parts[:num_parts]
        next_index = sum(len(part.token_ids) for part in before)
        other = choice(*args, next_index=next_index)
        after = written(other, ids, pieces[1])
        assert text_of(before) + text_of(after) == text
        assert [id_ for part in after for id_ in part.token_ids] == kept[next_index:]
        assert sum((part.logprobs for part in after), ()) == told[next_index:]
        assert all(part.first_index >= next_index for part in after)
        assert other.outcome == whole.outcome
        assert other.num_tokens == whole.num_tokens


@every_vocabulary
@given(
    text=some_text,
    prompt=st.text(LETTERS, max_size=5),
    pieces=st.tuples(cuts, cuts),
    stops=stop_strings,
    skip=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_a_text_goes_on_where_it_was_cut(
    name: str,
    text: str,
    prompt: str,
    pieces: tuple[list[int], list[int]],
    stops: list[str],
    skip: bool,
) -> None:
    vocabulary = VOCABULARIES[name]
    ids = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    context = vocabulary.tokenizer.encode(prompt, add_special_tokens=False).ids
    check_every_cut(vocabulary, ids, pieces, stops, skip, context, ())


@every_vocabulary
@given(
    ids=st.lists(st.integers(0, MOST_IDS), max_size=40),
    pieces=st.tuples(cuts, cuts),
    stops=st.lists(st.sampled_from(["a", "\N{REPLACEMENT CHARACTER}", "</s>", "é日"]), max_size=2),
    skip=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, MOST_IDS), max_size=2),
)
@settings(max_examples=150, deadline=None)
def test_any_tokens_go_on_where_they_were_cut(
    name: str,
    ids: list[int],
    pieces: tuple[list[int], list[int]],
    stops: list[str],
    skip: bool,
    stop_token_ids: list[int],
) -> None:
    check_every_cut(VOCABULARIES[name], ids, pieces, stops, skip, ids[::-1], stop_token_ids)


@every_vocabulary
def test_every_border_of_one_text(name: str) -> None:
    vocabulary = VOCABULARIES[name]
    text = "ab 日🙂 cd!é STOP and 🙂🙂"
    ids = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    borders = range(len(ids) + 1)
    for stops in ([], ["STOP"], ["🙂 c"], ["nowhere", "🙂🙂"]):
        for pieces in ((borders, []), ([], borders)):
            check_every_cut(vocabulary, ids, pieces, stops, True, [], [])


@every_vocabulary
@given(ids=st.lists(st.integers(0, MOST_IDS), max_size=60))
@example(ids=[10, 200, 201, 10])
@settings(max_examples=200, deadline=None)
def test_only_the_end_of_a_context_matters(name: str, ids: list[int]) -> None:
    vocabulary = VOCABULARIES[name]
    for skip in (False, True):
        tail = Detokenizer.context_of(vocabulary, skip, ids)
        assert Detokenizer.context_of(vocabulary, skip, tail) == tail


def test_a_client_cannot_have_more_than_there_is() -> None:
    vocabulary = VOCABULARIES["byte_level"]
    ids = vocabulary.tokenizer.encode("abc").ids
    writer = choice(vocabulary, [], True, [], next_index=len(ids) + 1)
    [nothing] = [writer.take([NewTokens(0, 0, tuple(ids))])]
    assert (nothing.text, nothing.token_ids) == ("", ())
    with pytest.raises(RequestError) as caught:
        writer.take([end(len(ids))])
    assert str(caught.value).startswith("next_token_indices[0]: ")


def test_a_whole_choice_ends_again() -> None:
    vocabulary = VOCABULARIES["byte_level"]
    ids = vocabulary.tokenizer.encode("abc").ids
    writer = choice(vocabulary, [], True, [], next_index=len(ids))
    [part] = [writer.take([NewTokens(0, 0, tuple(ids)), end(len(ids))])]
    assert (part.text, part.token_ids, part.first_index) == ("", (), len(ids))
    assert part.outcome is not None
