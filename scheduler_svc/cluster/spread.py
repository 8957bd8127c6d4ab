"""Spreads items over bins evenly, and moves as few as possible when either change. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b


def spread(
    items: Iterable[str], bins: Sequence[str], previous: Mapping[str, str]
) -> dict[str, str]:
    """The bin of each item; empty without bins. The numbers of items of two bins differ by at most
    one. Items stay in their `previous` bins, except as many as have to move.

    Where there is a choice, the bin with the greatest weight for the item is taken (rendezvous
    hashing: Thaler and Ravishankar, 1998), so that the result does not depend on any order.
    """
    if not bins:
        return {}
    contents: dict[str, set[str]] = {name: set() for name in bins}
    unplaced = []
    for item in sorted(items):
        contents.get(previous.get(item, ""), set()).add(item)
        if previous.get(item) not in contents:
            unplaced.append(item)
    for item in unplaced:
        least = min(map(len, contents.values()))
        candidates = [name for name, held in contents.items() if len(held) == least]
        contents[max(candidates, key=lambda name: weight(item, name))].add(item)
    while True:
        largest = max(contents.values(), key=lambda held: (len(held), sorted(held)))
        least = min(map(len, contents.values()))
        if len(largest) - least <= 1:
            return {item: name for name, held in contents.items() for item in held}
        smallest = [name for name, held in contents.items() if len(held) == least]
        moves = [(weight(item, name), item, name) for item in largest for name in smallest]
        _, item, target = max(moves)
        largest.remove(item)
        contents[target].add(item)


def weight(item: str, name: str) -> int:
    """The weight of a bin for an item: a hash of both."""
    digest = blake2b(f"{len(item)}:{item}{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
