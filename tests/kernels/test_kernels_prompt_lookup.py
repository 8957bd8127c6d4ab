"""Draft tokens by prompt lookup."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.dispatch import Implementation, cpp_implementations
from kernels.prompt_lookup import prompt_lookup

KINDS = [Implementation.REFERENCE, *cpp_implementations()[:1]]
ROOM = 6


def drafts(tokens: list[int], most: int, implementation: Implementation) -> list[int]:
    """Of a sequence in the middle one of three rows; the others stay as they are."""
    table = torch.full((3, len(tokens) + ROOM), -7, dtype=torch.int32)
    table[1, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    before = table.clone()
    one = [torch.tensor([value]) for value in (1, len(tokens), most)]
    count = int(prompt_lookup(table, *one, implementation=implementation))
    found: list[int] = table[1, len(tokens) : len(tokens) + count].tolist()
    before[1, len(tokens) : len(tokens) + count] = torch.tensor(found, dtype=torch.int32)
    assert torch.equal(table, before)
    return found


@pytest.mark.parametrize("implementation", KINDS)
@pytest.mark.parametrize(
    ("tokens", "most", "expected"),
    [
        # What followed the last tokens before.
        ([1, 2, 3, 4, 5, 1, 2], 3, [3, 4, 5]),
        ([1, 2, 3, 4, 5, 1, 2], 1, [3]),
        ([1, 2, 3, 4, 5, 1, 2], 0, []),
        # The drafts go on with the repetition.
        ([1, 2, 3, 1, 2], 6, [3, 1, 2, 3, 1, 2]),
        ([8, 8, 8], 4, [8, 8, 8, 8]),
        # One token is too little, and so are too few tokens.
        ([1, 2, 3, 2], 3, []),
        ([7], 3, []),
        ([7, 7], 3, []),
        # The latest of several.
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, [4, 1]),
        # A longer one is better than a later one; more than four tokens make no difference.
        ([9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2], 2, [3, 8]),
        ([6, 1, 2, 3, 4, 5, 7, 1, 2, 3, 4, 0, 6, 1, 2, 3, 4], 2, [0, 6]),
        ([5, 6, 1, 2, 3, 6, 6, 1, 2, 4, 5, 6, 1, 2], 2, [3, 6]),
    ],
)
def test_drafts_are_what_followed_before(
    tokens: list[int], most: int, expected: list[int], implementation: Implementation
) -> None:
    assert drafts(tokens, most, implementation) == expected


@pytest.mark.parametrize("implementation", KINDS[1:])
@given(
    sequences=st.lists(
        st.tuples(st.lists(st.integers(0, 3), max_size=300), st.integers(0, ROOM)), max_size=5
    ),
    data=st.data(),
)
def test_cpp_equals_the_reference(
    sequences: list[tuple[list[int], int]], data: st.DataObject, implementation: Implementation
) -> None:
    # Of many more values, pairs are rare: whole blocks have none.
    spread = data.draw(st.sampled_from([1, 40]))
    table = torch.zeros(8, 300 + ROOM, dtype=torch.int32)
    rows = torch.tensor(data.draw(st.permutations(range(8)))[: len(sequences)], dtype=torch.int64)
    for row, (tokens, _) in zip(rows.tolist(), sequences, strict=True):
        varied = [(token * 7 + at) % (4 * spread) for at, token in enumerate(tokens)]
        table[row, : len(tokens)] = torch.tensor(varied if spread > 1 else tokens)
    lengths = torch.tensor([len(tokens) for tokens, _ in sequences], dtype=torch.int64)
    most = torch.tensor([count for _, count in sequences], dtype=torch.int64)
    expected = table.clone()
    counts = prompt_lookup(expected, rows, lengths, most, implementation=KINDS[0])
    assert torch.equal(
        prompt_lookup(table, rows, lengths, most, implementation=implementation), counts
    )
    assert torch.equal(table, expected)


@pytest.mark.parametrize("implementation", KINDS[1:])
def test_a_row_without_room_is_refused(implementation: Implementation) -> None:
    table = torch.zeros(1, 4, dtype=torch.int32)
    with pytest.raises(IndexError, match="no room"):
        prompt_lookup(
            table,
            torch.tensor([0]),
            torch.tensor([3]),
            torch.tensor([2]),
            implementation=implementation,
        )
