"""Changes of logits in Triton against the references: masks and penalties bit for bit."""

import pytest
import torch
from logits_cases import VOCAB_SIZES, mask_case, penalty_case, same, typical_case
from triton_devices import DEVICES

from kernels.dispatch import Implementation
from kernels.logits import (
    apply_bitmask,
    apply_bitmask_reference,
    apply_penalties,
    apply_penalties_reference,
)
from kernels.typical_p import apply_typical_p

TRITON = Implementation.TRITON


@pytest.mark.parametrize("device", DEVICES)
def test_penalties_are_those_of_the_reference(device: str) -> None:
    torch.manual_seed(0)
    for vocab_size in VOCAB_SIZES:
        case = penalty_case(vocab_size)
        there = case.to(device)
        apply_penalties_reference(**vars(case))
        apply_penalties(**vars(there), implementation=TRITON)
        assert same(there.logits.cpu(), case.logits), vocab_size


@pytest.mark.parametrize("device", DEVICES)
def test_masks_are_those_of_the_reference(device: str) -> None:
    torch.manual_seed(1)
    for vocab_size in VOCAB_SIZES:
        case = mask_case(vocab_size)
        there = case.to(device)
        apply_bitmask_reference(**vars(case))
        apply_bitmask(**vars(there), implementation=TRITON)
        assert same(there.logits.cpu(), case.logits), vocab_size


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_change(device: str) -> None:
    penalties, masks = penalty_case(50).to(device), mask_case(50).to(device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    before = penalties.logits.clone(), masks.logits.clone()
    table = penalties.counts, none, none, penalties.penalties
    apply_penalties(penalties.logits, *table, implementation=TRITON)
    apply_bitmask(masks.logits, masks.bitmask[:0], none, implementation=TRITON)
    assert same(penalties.logits, before[0])
    assert same(masks.logits, before[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "vocab_size", [1, 33, *(pytest.param(size, marks=pytest.mark.slow) for size in (517, 2050))]
)
def test_typical_tokens_are_those_of_the_reference(vocab_size: int, device: str) -> None:
    torch.manual_seed(3)
    case = typical_case(vocab_size, 10)
    there = case.to(device)
    apply_typical_p(**vars(there), implementation=TRITON)
    expected, clear = case.expected()
    assert clear.sum() > 6
    assert same(there.logits.cpu()[clear], expected[clear])
