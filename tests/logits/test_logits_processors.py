"""Each logits processor against transformers' class or vLLM's definition, alone and all together,
in every implementation of the kernels."""

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import WITHOUT_PRODUCTS
from logits_cases import INF, random_logits, same
from logits_pipeline import MAX_NUM_SEQS, admission, append, changes, context, pipeline
from logits_reference import ReferenceRow
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TypicalLogitsWarper,
)

from kernels.dispatch import HAS_TRITON, Implementation, interprets_triton
from worker_svc.logits.masks import MinTokens
from worker_svc.plan.logits_params import Grammar, LogitsParams

_VOCAB_SIZE = 67
_TRITON = (Implementation.TRITON,) if HAS_TRITON and interprets_triton() else ()
_IMPLEMENTATIONS = (Implementation.REFERENCE, *WITHOUT_PRODUCTS, *_TRITON)
_PROMPT = [3, 50, 3, 66, 9]
_OUTPUT = [7, 8, 7, 3, 8, 8]

every_implementation = pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)


def ints(*tokens: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array(tokens, np.int64)


def words(*found: Sequence[int]) -> tuple[Any, ...]:
    return tuple(ints(*word) for word in found)


def changed(
    params: LogitsParams,
    logits: Tensor,
    implementation: Implementation | None = None,
    temperature: float = 1.0,
    num_known: int = 2,
) -> Tensor:
    """The changed logits `[vocab_size]` after _PROMPT and _OUTPUT, in a row between others;
    `num_known` of _OUTPUT were sampled elsewhere."""
    processors = pipeline(logits.shape[-1], implementation)
    known = _OUTPUT[:num_known]
    assert not processors.change_rows(changes([admission(5, params, _PROMPT, known, temperature)]))
    rows = ints(1, 5, 9)
    for token in _OUTPUT[num_known:]:
        scratch = logits.expand(3, -1).clone()
        processors.apply(scratch, rows)
        append(processors, rows.tolist(), [1, token, 2])
    batch = logits.expand(3, -1).clone()
    assert not processors.apply(batch, rows)
    processors.apply_typical_p(batch, rows)
    assert same(batch[0], logits)
    assert same(batch[2], logits)
    return batch[1]


_CLASSES: dict[str, tuple[LogitsParams, LogitsProcessor]] = {
    "repetition": (
        LogitsParams(repetition_penalty=1.3),
        RepetitionPenaltyLogitsProcessor(1.3),
    ),
    "repetition below 1": (
        LogitsParams(repetition_penalty=0.7),
        RepetitionPenaltyLogitsProcessor(0.7),
    ),
    "min_tokens": (
        LogitsParams(min_tokens=7, stop_token_ids=ints(4, 66)),
        MinNewTokensLengthLogitsProcessor(len(_PROMPT), 7, [4, 66], device="cpu"),
    ),
    "min_tokens reached": (
        LogitsParams(min_tokens=6, stop_token_ids=ints(4, 66)),
        MinNewTokensLengthLogitsProcessor(len(_PROMPT), 6, [4, 66], device="cpu"),
    ),
    "bad words": (
        LogitsParams(bad_words=words([5], [8, 8, 11], [8, 12], [7, 8, 13], [8, 12], [3, 8, 8, 8])),
        NoBadWordsLogitsProcessor([[5], [8, 8, 11], [8, 12], [7, 8, 13], [3, 8, 8, 8]]),
    ),
    "bias": (
        LogitsParams(bias_token_ids=ints(66, 0, 9), biases=np.array([2, -3.5, 100], np.float32)),
        SequenceBiasLogitsProcessor([[[66], 2.0], [[0], -3.5], [[9], 100.0]]),
    ),
    "allowed": (
        LogitsParams(allowed_token_ids=ints(2, 31, 32, 66, 2, _VOCAB_SIZE, 10**6)),
        SuppressTokensLogitsProcessor(
            [token for token in range(_VOCAB_SIZE) if token not in (2, 31, 32, 66)], device="cpu"
        ),
    ),
    "typical_p": (LogitsParams(typical_p=0.4), TypicalLogitsWarper(mass=0.4)),
    "typical_p near 1": (LogitsParams(typical_p=0.98), TypicalLogitsWarper(mass=0.98)),
}


@every_implementation
@pytest.mark.parametrize("name", sorted(_CLASSES))
def test_a_processor_is_that_of_transformers(name: str, implementation: Implementation) -> None:
    params, theirs = _CLASSES[name]
    torch.manual_seed(0)
    for _ in range(5):
        logits = 4 * torch.randn(_VOCAB_SIZE)
        expected = theirs(torch.tensor([_PROMPT + _OUTPUT]), logits[None].clone())[0]
        for num_known in (0, 4, len(_OUTPUT)):
            found = changed(params, logits, implementation, num_known=num_known)
            assert same(found, expected)
        assert not same(expected, logits) or name == "min_tokens reached"


_DEFINITIONS = {
    "presence": LogitsParams(presence_penalty=0.7),
    "frequency": LogitsParams(frequency_penalty=-1.3),
    "all penalties": LogitsParams(
        repetition_penalty=1.7, presence_penalty=-0.3, frequency_penalty=0.9
    ),
    "words of other lengths": LogitsParams(
        bad_words=words([9, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 3, 8, 8, 20], [8, _VOCAB_SIZE])
    ),
    "everything": LogitsParams(
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.2,
        min_tokens=9,
        stop_token_ids=ints(8, 3),
        bias_token_ids=ints(7, 8, 9),
        biases=np.array([1, 2, 3], np.float32),
        allowed_token_ids=ints(*range(0, 60, 3), 7, 8),
        bad_words=words([9], [8, 7]),
    ),
}


@every_implementation
@pytest.mark.parametrize("name", sorted(_DEFINITIONS))
def test_a_processor_is_that_of_the_definition(name: str, implementation: Implementation) -> None:
    """vLLM's; the last word of "words of other lengths" ends with no token of the vocabulary."""
    params = _DEFINITIONS[name]
    known = [word for word in params.bad_words if word[-1] < _VOCAB_SIZE]
    reference = ReferenceRow(
        LogitsParams(**{**vars(params), "bad_words": tuple(known)}), _PROMPT, _OUTPUT
    )
    torch.manual_seed(1)
    logits = random_logits(1, _VOCAB_SIZE)[0]
    for num_known in range(len(_OUTPUT) + 1):
        found = changed(params, logits, implementation, num_known=num_known)
        assert same(found, reference.apply(logits)), num_known


def test_the_prompt_is_no_part_of_a_bad_word() -> None:
    params = LogitsParams(bad_words=words([_PROMPT[-1], 20], [_PROMPT[-1], _OUTPUT[0], 21]))
    logits = torch.zeros(_VOCAB_SIZE)
    processors = pipeline(_VOCAB_SIZE)
    processors.change_rows(changes([admission(0, params, _PROMPT)]))
    for token in _OUTPUT[:1]:
        batch = logits[None].clone()
        processors.apply(batch, ints(0))
        assert same(batch[0], logits)
        append(processors, [0], [token])
    batch = logits[None].clone()
    processors.apply(batch, ints(0))
    assert same(batch[0], logits)


@every_implementation
def test_typical_p_follows_the_temperature(implementation: Implementation) -> None:
    torch.manual_seed(2)
    params = LogitsParams(typical_p=0.5)
    reference = ReferenceRow(params, _PROMPT, _OUTPUT)
    kept = set()
    for temperature in (0.0, 0.3, 1.0, 2.5):
        logits = 3 * torch.randn(_VOCAB_SIZE)
        logits[5:9] = -INF
        found = changed(params, logits, implementation, temperature)
        assert same(found, reference.keep_typical(logits, temperature))
        kept.add(int((found > -INF).sum()))
    assert len(kept) == 4


@every_implementation
def test_typical_p_leaves_what_is_no_distribution(implementation: Implementation) -> None:
    params = LogitsParams(typical_p=0.5)
    for wrong in ([torch.nan, 1.0], [INF, 1.0], [-INF, -INF]):
        logits = torch.tensor(wrong).repeat(20)
        assert same(changed(params, logits, implementation), logits)


tokens = st.integers(0, _VOCAB_SIZE - 1)
penalties = st.one_of(st.just(0.0), st.floats(-2, 2, width=32))
biases = st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=5)


@st.composite
def params_of_rows(draw: st.DrawFn) -> LogitsParams | None:
    if draw(st.integers(0, 4)) == 0:
        return None
    bias = draw(biases)
    return LogitsParams(
        presence_penalty=draw(penalties),
        frequency_penalty=draw(penalties),
        repetition_penalty=draw(st.one_of(st.just(1.0), st.floats(0.25, 2, width=32))),
        min_tokens=draw(st.integers(0, 6)),
        stop_token_ids=ints(*draw(st.sets(tokens, max_size=3))),
        bias_token_ids=ints(*bias),
        biases=np.array(list(bias.values()), np.float32),
        allowed_token_ids=ints(*draw(st.one_of(st.just([]), st.lists(tokens, max_size=40)))),
        # Of few tokens, as the output is below, so that words occur.
        bad_words=words(
            *draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=6))
        ),
    )


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(params_of_rows(), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
    implementation=st.sampled_from(_IMPLEMENTATIONS),
)
def test_rows_that_come_and_go_are_those_of_the_definition(
    rows: list[LogitsParams | None], seed: int, implementation: Implementation
) -> None:
    """Sequences run in any rows and batches, are preempted in mid-output, and continue in other
    rows."""
    draw = Random(seed)
    torch.manual_seed(seed)
    processors = pipeline(_VOCAB_SIZE, implementation)
    waiting = [
        ReferenceRow(params or LogitsParams(), [draw.randrange(_VOCAB_SIZE) for _ in range(3)])
        for params in rows
    ]
    running: dict[int, ReferenceRow] = {}
    for _ in range(12):
        released = [row for row in running if draw.random() < 0.2]
        waiting += [running.pop(row) for row in released]
        admitted = [each for each in waiting if draw.random() < 0.6]
        waiting = [each for each in waiting if each not in admitted]
        free = draw.sample(sorted(set(range(MAX_NUM_SEQS)) - set(running)), len(admitted))
        running |= dict(zip(free, admitted, strict=True))
        processors.change_rows(
            changes(
                [
                    admission(row, running[row].params, running[row].prompt, running[row].output)
                    for row in free
                ],
                released,
            )
        )
        batch = draw.sample(sorted(running), draw.randint(0, len(running)))
        logits = random_logits(len(batch), _VOCAB_SIZE)
        found = logits.clone()
        assert not processors.apply(found, ints(*batch))
        for line, row in enumerate(batch):
            assert same(found[line], running[row].apply(logits[line]))
        sampled = [draw.randrange(3) for _ in batch]
        append(processors, batch, sampled)
        for row, token in zip(batch, sampled, strict=True):
            running[row].output.append(token)


@pytest.mark.parametrize("has_grammar", [False, True])
def test_the_end_of_a_grammar_comes_before_min_tokens(has_grammar: bool) -> None:
    """Where stop tokens alone are possible. Without a grammar nothing is possible then."""
    params = LogitsParams(min_tokens=5, stop_token_ids=ints(4, 66))
    guided = LogitsParams(**{**vars(params), "grammar": Grammar("start: ")})
    processor = MinTokens(context(_VOCAB_SIZE))
    for row, each in enumerate((params, guided)):
        assert processor.admit(row, each, ints(1), 1)
    logits = torch.full((3, _VOCAB_SIZE), -INF)
    logits[:, [4, 66]] = 1.0
    logits[1, 7] = 1.0
    rows = ints(int(has_grammar), int(has_grammar), 0)
    processor.apply(logits, ints(0), rows[:1])
    processor.apply(logits, ints(1), rows[:1])
    processor.apply(logits, ints(2), rows[2:])
    kept = [(line > -INF).nonzero().flatten().tolist() for line in logits]
    assert kept == [[4, 66] if has_grammar else [], [7], []]


def test_bad_words_with_the_same_last_token_exclude_it_even_if_its_logit_is_no_number() -> None:
    params = LogitsParams(bad_words=(np.array([2, 1]), np.array([5, 1]), np.array([2, 3])))
    processors = pipeline(_VOCAB_SIZE, Implementation.REFERENCE)
    processors.change_rows(changes([admission(4, params, [9], [7, 2])], []))
    logits = torch.zeros(1, _VOCAB_SIZE)
    logits[0, 1] = torch.nan
    assert not processors.apply(logits, ints(4))
    assert logits[0, :4].tolist() == [0, -torch.inf, 0, -torch.inf]
