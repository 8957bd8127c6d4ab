"""Simulates shards with prefix caches, and gateways that choose among them. No I/O, no clock."""

import heapq
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from gateway_svc.scheduler.prefix_keys import PrefixKeys
from gateway_svc.scheduler.shard_choice import ShardLoad, choose, rendezvous_order

BLOCK_TOKENS = 16
# As leaders send it.
REPORT_INTERVAL_S = 0.25


@dataclass(frozen=True)
class Request:
    """Its own tokens are unique; `group` is what it belongs to in a test's view."""

    at_s: float
    token_ids: Sequence[int]
    service_s: float
    group: int


class Cache:
    """The blocks of one pool, the least recently used ones replaced."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def num_hits(self, hashes: Sequence[int]) -> int:
        return next((at for at, one in enumerate(hashes) if one not in self._blocks), len(hashes))

    def use(self, hashes: Sequence[int]) -> None:
        # The last block is the least useful one.
        for one in reversed(hashes):
            self._blocks[one] = None
            self._blocks.move_to_end(one)
        while len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)


@dataclass
class Worker:
    cache: Cache
    num_rows: int = 0


@dataclass
class Gateway:
    """What one gateway knows."""

    keys: PrefixKeys = field(default_factory=PrefixKeys)
    # By shard: live sequences as last reported, and how many more this gateway has given it since.
    reported: Counter[int] = field(default_factory=Counter)
    given: Counter[int] = field(default_factory=Counter)

    def choose(self, request: Request, num_shards: int, num_workers: int) -> int:
        key = self.keys.choose(request.token_ids, b"", num_shards, request.at_s)
        loads = [
            ShardLoad(num_workers, max(0, self.reported[shard] + self.given[shard]))
            for shard in range(num_shards)
        ]
        return choose(rendezvous_order(key, num_shards), loads).shards[0]


@dataclass(frozen=True)
class Outcome:
    # Of all tokens in whole blocks of prompts.
    hit_rate: float
    # By shard, the mean number of live sequences.
    mean_loads: Sequence[float]
    # By request, in order.
    shards: Sequence[int]

    @property
    def largest_load(self) -> float:
        """As a multiple of the mean."""
        return max(self.mean_loads) * len(self.mean_loads) / sum(self.mean_loads)


def run(
    requests: Sequence[Request],
    num_shards: int,
    workers_per_shard: int,
    blocks_per_worker: int,
    num_gateways: int = 2,
) -> Outcome:
    """Requests go to gateways round robin, and in a shard to the worker with the least to do."""
    shards = [
        [Worker(Cache(blocks_per_worker)) for _ in range(workers_per_shard)]
        for _ in range(num_shards)
    ]
    gateways = [Gateway() for _ in range(num_gateways)]
    live: Counter[int] = Counter()
    busy_s: Counter[int] = Counter()
    ends: list[tuple[float, int, int, Worker, Gateway]] = []
    chosen: list[int] = []
    num_hits = num_blocks = 0
    next_report_s = 0.0
    for number, request in enumerate(requests):
        while ends and ends[0][0] <= request.at_s:
            *_, shard, worker, gateway = heapq.heappop(ends)
            live[shard] -= 1
            worker.num_rows -= 1
            gateway.given[shard] -= 1
        if request.at_s >= next_report_s:
            next_report_s = request.at_s + REPORT_INTERVAL_S
            for gateway in gateways:
                gateway.reported, gateway.given = Counter(live), Counter()
        gateway = gateways[number % num_gateways]
        shard = gateway.choose(request, num_shards, workers_per_shard)
        hashes = block_hashes(request.token_ids)
        worker = min(shards[shard], key=lambda one: _cost(one, hashes))
        num_hits += worker.cache.num_hits(hashes)
        num_blocks += len(hashes)
        worker.cache.use(hashes)
        worker.num_rows += 1
        live[shard] += 1
        gateway.given[shard] += 1
        busy_s[shard] += request.service_s
        chosen.append(shard)
        heapq.heappush(ends, (request.at_s + request.service_s, number, shard, worker, gateway))
    loads = [busy_s[shard] / requests[-1].at_s for shard in range(num_shards)]
    return Outcome(num_hits / num_blocks, loads, chosen)


def _cost(worker: Worker, hashes: Sequence[int]) -> int:
    return (len(hashes) - worker.cache.num_hits(hashes)) * BLOCK_TOKENS + worker.num_rows


def block_hashes(token_ids: Sequence[int]) -> list[int]:
    hashes: list[int] = []
    previous = 0
    for end in range(BLOCK_TOKENS, len(token_ids) + 1, BLOCK_TOKENS):
        previous = hash((previous, tuple(token_ids[end - BLOCK_TOKENS : end])))
        hashes.append(previous)
    return hashes


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(32_000) for _ in range(count)]


def zipf(rng: random.Random, num_requests: int, per_s: float) -> Iterator[Request]:
    """64 prefixes of 512 tokens, that of rank r with a share of 1/r, and own tails."""
    prefixes = [tokens(rng, 512) for _ in range(64)]
    weights = [1 / rank for rank in range(1, 65)]
    at_s = 0.0
    for _ in range(num_requests):
        at_s += rng.expovariate(per_s)
        rank = rng.choices(range(64), weights)[0]
        own = tokens(rng, rng.randint(16, 48))
        yield Request(at_s, prefixes[rank] + own, rng.uniform(0.5, 1.5), rank)


def conversations(
    rng: random.Random,
    num_conversations: int,
    num_requests: int,
    duration_s: float,
    system_tokens: int,
    length: Callable[[random.Random], int] = lambda rng: rng.randint(60, 240),
) -> list[Request]:
    """Conversations that begin at random moments with the same system prompt; each request
    adds a question and the previous output."""
    system = tokens(rng, system_tokens)
    requests: list[Request] = []
    for conversation in range(num_conversations):
        at_s, history = rng.uniform(0, duration_s), list(system)
        for _ in range(num_requests):
            history += tokens(rng, length(rng))
            service_s = rng.uniform(0.5, 1.5)
            requests.append(Request(at_s, tuple(history), service_s, conversation))
            at_s += service_s + rng.uniform(1, 10)
    return sorted(requests, key=lambda request: request.at_s)
