"""Masks and penalties: every implementation against the definition, written out."""

import pytest
import torch
from implementations import WITHOUT_PRODUCTS
from logits_cases import INF, VOCAB_SIZES, mask_case, penalty_case, same, typical_case

from kernels.dispatch import Implementation
from kernels.logits import apply_bitmask, apply_penalties, bitmask_width
from kernels.typical_p import apply_typical_p

_IMPLEMENTATIONS = (Implementation.REFERENCE, *WITHOUT_PRODUCTS)

every_implementation = pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)


@every_implementation
def test_penalties_are_those_of_the_definition(implementation: Implementation) -> None:
    """Bit for bit."""
    torch.manual_seed(0)
    for vocab_size in VOCAB_SIZES[:7]:
        case = penalty_case(vocab_size)
        expected = case.expected()
        apply_penalties(**vars(case), implementation=implementation)
        assert same(case.logits, expected), vocab_size


@every_implementation
def test_masks_are_those_of_the_definition(implementation: Implementation) -> None:
    torch.manual_seed(1)
    for vocab_size in VOCAB_SIZES:
        case = mask_case(vocab_size)
        expected = case.expected()
        apply_bitmask(**vars(case), implementation=implementation)
        assert same(case.logits, expected), vocab_size


@every_implementation
def test_a_line_does_not_depend_on_the_others(implementation: Implementation) -> None:
    torch.manual_seed(2)
    penalties, masks = penalty_case(40_001, 9), mask_case(40_001, 9)
    alone = [penalties.logits[4:5].clone(), masks.logits[4:5].clone()]
    zero = torch.zeros(1, dtype=torch.int64)
    table = penalties.counts, zero, penalties.slots[2:3], penalties.penalties
    apply_penalties(alone[0], *table, implementation=implementation)
    apply_bitmask(alone[1], masks.bitmask[2:3], zero, implementation=implementation)
    apply_penalties(**vars(penalties), implementation=implementation)
    apply_bitmask(**vars(masks), implementation=implementation)
    assert same(penalties.logits[4:5], alone[0])
    assert same(masks.logits[4:5], alone[1])


@every_implementation
def test_nothing_to_change(implementation: Implementation) -> None:
    penalties, masks = penalty_case(50), mask_case(50)
    before = penalties.logits.clone(), masks.logits.clone()
    none = torch.empty(0, dtype=torch.int64)
    table = penalties.counts, none, none, penalties.penalties
    apply_penalties(penalties.logits, *table, implementation=implementation)
    apply_bitmask(masks.logits, masks.bitmask[:0], none, implementation=implementation)
    assert same(penalties.logits, before[0])
    assert same(masks.logits, before[1])


def test_the_width_of_a_mask() -> None:
    assert [bitmask_width(size) for size in (1, 32, 33, 151_936)] == [1, 1, 2, 4748]


@pytest.mark.parametrize("implementation", WITHOUT_PRODUCTS)
def test_tensors_that_do_not_fit_are_refused(implementation: Implementation) -> None:
    """Instead of memory that is not theirs being read."""
    masks, penalties = mask_case(64), penalty_case(64)
    wrong = torch.tensor([7])
    with pytest.raises(IndexError):
        apply_bitmask(masks.logits, masks.bitmask[:1], wrong, implementation=implementation)
    with pytest.raises(RuntimeError, match="bitmask must be"):
        apply_bitmask(
            masks.logits, masks.bitmask[:, :1], masks.lines, implementation=implementation
        )
    table = penalties.counts, penalties.lines, penalties.slots + 9, penalties.penalties
    with pytest.raises(IndexError):
        apply_penalties(penalties.logits, *table, implementation=implementation)
    table = penalties.counts[:, 1:], penalties.lines, penalties.slots, penalties.penalties
    with pytest.raises(RuntimeError, match="counts must be"):
        apply_penalties(penalties.logits, *table, implementation=implementation)


@every_implementation
def test_an_impossible_token_stays_impossible(implementation: Implementation) -> None:
    logits = torch.full((1, 40), -INF)
    counts = torch.full((1, 40), 3, dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int64)
    table = counts, zero, zero, torch.tensor([[2.0, -2.0, -2.0]])
    apply_penalties(logits, *table, implementation=implementation)
    assert (logits == -INF).all()


@pytest.mark.parametrize("implementation", WITHOUT_PRODUCTS)
@pytest.mark.parametrize("vocab_size", [1, 2, 33, 517, pytest.param(5003, marks=pytest.mark.slow)])
def test_typical_tokens_are_those_of_the_reference(
    vocab_size: int, implementation: Implementation
) -> None:
    """Wherever rounding cannot change them, which is so in nearly all lines."""
    torch.manual_seed(3)
    case = typical_case(vocab_size, 40)
    expected, clear = case.expected()
    assert clear.sum() > 30
    apply_typical_p(**vars(case), implementation=implementation)
    assert same(case.logits[clear], expected[clear])
