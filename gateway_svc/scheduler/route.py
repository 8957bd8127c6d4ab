"""The shard of a request's stream, and what limits how it changes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.service.errors import RequestError


@dataclass
class Route:
    # The shard that has the stream; None while it is looked up.
    shard: int | None = 0
    # Shards that the request may be given to if this one refuses it, in their order.
    alternatives: Sequence[int] = ()
    # By shards that had no room for the request, or for its tenant.
    refusals: list[RequestError] = field(default_factory=list)
    # Times that a shard named another one, since one has accepted the request.
    num_moves: int = 0
    num_lookups: int = 0


@dataclass(frozen=True)
class RoutingCounters:
    """Functions that count events."""

    # A request was attached again to the same shard.
    reattached: Callable[[], object] = lambda: None
    # A request was given to another shard than its prefix's, because that one has too much load.
    spilled: Callable[[], object] = lambda: None
    # A shard without room has refused a request, and another one was tried.
    refused: Callable[[], object] = lambda: None
    # A shard has named another one that a request belongs to.
    moved: Callable[[], object] = lambda: None
