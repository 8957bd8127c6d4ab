"""Hash chains against explicit SHA-256."""

import struct
from array import array
from hashlib import sha256

import pytest

from scheduler_svc.store.hashing import HashChain, num_matchable_blocks, root_hash

ROOT = root_hash(b"fingerprint")


def chain(tokens: list[int], salt: bytes = b"", root: bytes = ROOT) -> tuple[bytes, ...]:
    hashes = HashChain(root, 4, salt)
    hashes.extend_to(array("I", tokens))
    return tuple(hashes.hashes)


def test_a_block_is_hashed_over_parent_tokens_and_salt() -> None:
    first = sha256(ROOT + struct.pack("<4I", 1, 2, 3, 2**32 - 1) + b"salt").digest()
    second = sha256(first + struct.pack("<4I", 5, 6, 7, 8) + b"salt").digest()
    assert chain([1, 2, 3, 2**32 - 1, 5, 6, 7, 8, 9], b"salt") == (first, second)


def test_only_full_blocks_are_hashed() -> None:
    assert [len(chain(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_chain_grows_token_by_token_to_the_same_hashes() -> None:
    grown = HashChain(ROOT, 4)
    for length in range(14):
        grown.extend_to(array("I", range(length)))
    assert tuple(grown.hashes) == chain(list(range(13)))


def test_a_hash_depends_on_every_token_before_it() -> None:
    one, other = chain([1, 2, 3, 4, 5, 6, 7, 8]), chain([9, 2, 3, 4, 5, 6, 7, 8])
    assert not set(one) & set(other)


def test_models_and_salts_are_kept_apart() -> None:
    tokens = [1, 2, 3, 4]
    found = {chain(tokens, salt) for salt in (b"", b"a", b"aa")}
    found |= {chain(tokens, root=root_hash(b"other"))}
    assert len(found) == 4


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0), (1, 0), (16, 0), (17, 1), (48, 2), (49, 3), (55, 3)]
)
def test_a_match_leaves_the_last_token_to_be_computed(num_tokens: int, expected: int) -> None:
    assert num_matchable_blocks(num_tokens, 16) == expected
