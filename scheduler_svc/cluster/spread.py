"""Spreads items over bins evenly, and moves as few as possible when either change. Pure."""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b


def spread(
    items: Iterable[str],
    bins: Sequence[str],
    previous: Mapping[str, str],
    arrivals: Mapping[str, int] | None = None,
) -> dict[str, str]:
    """The bin of each item; empty without bins. The numbers of items of two bins differ by at most
    one. Items stay in their `previous` bins, except as many as have to move.

    Those move that have come last into their bins: with the greatest of `arrivals`, 0 if absent.
    Where there is still a choice, the item and the bin with the greatest weight are taken
    (rendezvous hashing: Thaler and Ravishankar, 1998), so that the result does not depend on any
    order.
    """
    if not bins:
        return {}
    contents: dict[str, list[str]] = {name: [] for name in bins}
    unplaced: list[str] = []
    for item in items:
        contents.get(previous.get(item, ""), unplaced).append(item)
    placed = {item: name for name, held in contents.items() for item in held}
    least, num_larger = divmod(len(placed) + len(unplaced), len(bins))
    arrived = {item: (arrivals or {}).get(item, 0) for item in (*placed, *unplaced)}
    large = sorted(
        (name for name, held in contents.items() if len(held) > least),
        key=lambda name: (-len(contents[name]), max(arrived[x] for x in contents[name]), name),
    )
    # By bin, how many items it gives.
    surplus = {
        name: len(contents[name]) - least - (place < num_larger) for place, name in enumerate(large)
    }
    # By bin, how many it takes; so many of these bins take one more.
    room = {name: least - len(held) for name, held in contents.items() if len(held) <= least}
    num_more = max(0, num_larger - len(large))
    movable = [item for name, count in surplus.items() if count for item in contents[name]]
    candidates = {item: arrived[item] for item in (*unplaced, *movable)}
    return placed | dict(_best_pairs(candidates, room, num_more, surplus, placed))


def _best_pairs(
    items: Mapping[str, int],
    room: dict[str, int],
    num_more: int,
    surplus: dict[str, int],
    placed: Mapping[str, str],
) -> Iterator[tuple[str, str]]:
    """Yield items with their new bins by descending arrival and weight, until no bin has a surplus
    and none of `items`, which have their arrivals, is without a bin. Changes `room` and `surplus`.

    Each item has one entry in the heap, which is corrected when its bin is full: a pass over all
    pairs for every move would hold the event loop for seconds with hundreds of workers and shards.
    """

    def entry(item: str) -> tuple[int, int, str, str]:
        best, name = max((weight(item, name), name) for name in is_open)
        return -items[item], -best, item, name

    is_open = {name for name, count in room.items() if count or num_more}
    left = sum(room.values()) + num_more
    heap = [entry(item) for item in items] if left else []
    heapq.heapify(heap)
    while left:
        *_, item, name = heapq.heappop(heap)
        source = placed.get(item)
        if source is not None and not surplus[source]:
            continue
        if name not in is_open:
            heapq.heappush(heap, entry(item))
            continue
        yield item, name
        left -= 1
        if source is not None:
            surplus[source] -= 1
        room[name] -= 1
        if room[name] < 0:
            num_more -= 1
        if room[name] < 0 or not (room[name] or num_more):
            is_open.remove(name)
        if not num_more:
            is_open = {other for other in is_open if room[other] > 0}


def weight(item: str, name: str) -> int:
    """The weight of a bin for an item: a hash of both."""
    digest = blake2b(f"{len(item)}:{item}{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
