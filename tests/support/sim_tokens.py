"""The tokens of simulated workers, computed one at a time."""

_MASK = 2**64 - 1


def token_at(seed: int, position: int, vocab_size: int) -> int:
    """Output `position` of the generator SplitMix64 seeded with `seed`, modulo `vocab_size`."""
    word = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return (word ^ (word >> 31)) % vocab_size
