"""The choice of a request's shard: order, bound, keys, and what they give in simulations."""

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shard_simulation import Outcome, Request, conversations, run, tokens, zipf

from gateway_svc.scheduler.prefix_keys import DEPTHS, MAX_TOKENS, STEP_TOKENS, PrefixKeys
from gateway_svc.scheduler.shard_choice import (
    BOUND,
    LIGHT_LOAD,
    ShardLoad,
    choose,
    rendezvous_order,
)

LOADS = st.lists(
    st.builds(ShardLoad, num_workers=st.integers(0, 4), num_live=st.integers(0, 200)),
    min_size=1,
    max_size=12,
)
KEYS = [number.to_bytes(16, "little") for number in range(4000)]


@given(LOADS, st.binary(min_size=1, max_size=16))
def test_the_first_shard_within_the_bound_is_tried_first_then_the_others_in_order(
    loads: list[ShardLoad], key: bytes
) -> None:
    order = rendezvous_order(key, len(loads))
    assert sorted(order) == list(range(len(loads)))
    chosen = choose(order, loads)
    usable = [shard for shard in order if loads[shard].num_workers]
    if not usable:
        assert (chosen.shards, chosen.is_spilled) == (tuple(order), False)
        return
    per_worker = {shard: loads[shard].num_live / loads[shard].num_workers for shard in usable}
    mean = sum(loads[shard].num_live for shard in usable) / sum(
        loads[shard].num_workers for shard in usable
    )
    skipped = usable[: usable.index(chosen.shards[0])]
    assert all(per_worker[shard] > max(BOUND * mean, LIGHT_LOAD) - 1e-9 for shard in skipped)
    assert per_worker[chosen.shards[0]] <= max(BOUND * mean, LIGHT_LOAD) + 1e-9
    assert chosen.is_spilled == bool(skipped)
    assert [shard for shard in usable if shard != chosen.shards[0]] == list(chosen.shards[1:])


@pytest.mark.parametrize("num_shards", [1, 2, 4, 7, 8, 63])
def test_a_new_shard_takes_its_part_of_the_keys_and_no_other_key_moves(num_shards: int) -> None:
    moved = 0
    for key in KEYS:
        before, after = rendezvous_order(key, num_shards), rendezvous_order(key, num_shards + 1)
        assert [shard for shard in after if shard != num_shards] == before
        moved += after[0] != before[0]
    assert moved / len(KEYS) == pytest.approx(1 / (num_shards + 1), rel=0.35)


def test_keys_are_spread_evenly() -> None:
    counts = Counter(rendezvous_order(key, 8)[0] for key in KEYS)
    assert all(count == pytest.approx(len(KEYS) / 8, rel=0.15) for count in counts.values())


def test_prompts_with_a_cold_prefix_have_its_key() -> None:
    keys, rng = PrefixKeys(), random.Random(1)
    prefix = tokens(rng, STEP_TOKENS)
    others = [tokens(rng, 40) for _ in range(200)]
    for other in others:
        keys.choose(other, b"", 4, 0.0)
    found = {keys.choose(prefix + tokens(rng, 300), b"", 4, 0.0) for _ in range(5)}
    assert len(found) == 1
    assert found != {keys.choose(others[0], b"", 4, 0.0)}
    # Another salt shares no blocks.
    assert keys.choose(prefix, b"salt", 4, 0.0) not in found


def test_a_hot_prefix_is_divided_where_prompts_differ() -> None:
    keys, rng = PrefixKeys(), random.Random(1)
    system = tokens(rng, 256)
    users = [system + tokens(rng, 64) for _ in range(20)]
    for _ in range(20):
        for user in users:
            keys.choose(user, b"", 4, 0.0)
    of_users = [keys.choose(user, b"", 4, 0.0) for user in users]
    assert len(set(of_users)) == 20
    # What follows does not matter: a user's share is not that of a hot prefix.
    longer = [keys.choose(user + tokens(rng, 500), b"", 4, 0.0) for user in users]
    assert longer == of_users


def test_a_hot_prefix_that_nothing_divides_keeps_its_key() -> None:
    keys, rng = PrefixKeys(), random.Random(1)
    prompt = tokens(rng, 2000)
    assert len({keys.choose(prompt, b"", 4, 0.0) for _ in range(300)}) == 1


def test_a_prefix_cools_down() -> None:
    keys, rng = PrefixKeys(), random.Random(1)
    system = tokens(rng, STEP_TOKENS)
    for _ in range(100):
        keys.choose(system + tokens(rng, 64), b"", 2, 0.0)
    assert keys.share(system) == pytest.approx(1)
    hot = {keys.choose(system + tokens(rng, 64), b"", 2, 0.0) for _ in range(5)}
    assert len(hot) == 5
    for number in range(100):
        keys.choose(tokens(rng, 64), b"", 2, 300.0 + number)
    assert keys.share(system) < 0.05
    cold = {keys.choose(system + tokens(rng, 64), b"", 2, 400.0) for _ in range(5)}
    assert len(cold) == 1


def test_counts_decay_also_over_a_long_time() -> None:
    """Weights grow exponentially, and are scaled before they overflow."""
    keys, rng = PrefixKeys(), random.Random(1)
    prompts = [tokens(rng, STEP_TOKENS) for _ in range(2)]
    for second in range(0, 100_000, 50):
        keys.choose(prompts[second % 100 // 50], b"", 4, float(second))
    shares = [keys.share(prompt) for prompt in prompts]
    assert sum(shares) == pytest.approx(1)
    # The newer one is 50 s younger.
    assert shares[1] > shares[0] > 0.25


@given(st.lists(st.lists(st.integers(0, 1), max_size=200), max_size=30), st.integers(1, 8))
def test_keys_depend_on_counted_prompts_alone(prompts: list[list[int]], num_shards: int) -> None:
    one, other = PrefixKeys(), PrefixKeys()
    for at, prompt in enumerate(prompts):
        key = one.choose(prompt, b"", num_shards, float(at))
        assert key == other.choose(tuple(prompt), b"", num_shards, float(at))
        assert len(key) == 16
        assert len(one) <= sum(len(known) // STEP_TOKENS + 1 for known in prompts)


def test_the_table_is_bounded_and_keeps_what_is_used() -> None:
    keys, rng = PrefixKeys(max_prefixes=100), random.Random(1)
    system = tokens(rng, 256)
    for _ in range(500):
        keys.choose(system + tokens(rng, 300), b"", 4, 0.0)
        keys.choose(tokens(rng, 300), b"", 4, 0.0)
        assert len(keys) <= 100
    assert keys.share(system) == pytest.approx(0.5, abs=0.02)


def test_prefixes_have_growing_lengths() -> None:
    assert (DEPTHS[0], DEPTHS[-1]) == (STEP_TOKENS, MAX_TOKENS)
    assert all(short < long <= max(short + STEP_TOKENS, short * 1.13) for short, long in
               pairwise(DEPTHS))  # fmt: skip


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(other, marks=pytest.mark.slow) for other in (1, 2))]
)
@pytest.mark.parametrize("blocks_per_worker", [512, 768])
def test_shared_prefixes_are_found_and_loads_are_even(seed: int, blocks_per_worker: int) -> None:
    """Four shards of two workers, as against one pool of all blocks, with 4 or 12 live sequences
    per worker. The prefixes fill half of all blocks, or a third."""
    for per_s in (32, 100):
        requests = list(zipf(random.Random(seed), 3000, per_s))
        chosen = run(requests, 4, 2, blocks_per_worker)
        together = run(requests, 1, 1, 8 * blocks_per_worker)
        assert chosen.hit_rate >= 0.9 * together.hit_rate
        assert chosen.largest_load <= 1.3


def test_with_a_light_load_prefixes_are_kept_together() -> None:
    requests = list(zipf(random.Random(0), 3000, 16))
    chosen, together = run(requests, 4, 2, 384), run(requests, 1, 1, 8 * 384)
    assert chosen.hit_rate >= 0.95 * together.hit_rate
    assert max(chosen.mean_loads) <= 2 * LIGHT_LOAD


def stay_rate(requests: Sequence[Request], outcome: Outcome) -> float:
    """The share of requests, but a conversation's first ones, on the shard of the one before."""
    by_group: dict[int, list[int]] = defaultdict(list)
    for request, shard in zip(requests, outcome.shards, strict=True):
        by_group[request.group].append(shard)
    pairs = [pair for shards in by_group.values() for pair in pairwise(shards)]
    return sum(one == other for one, other in pairs) / len(pairs)


@pytest.mark.parametrize(
    ("num_conversations", "system_tokens", "blocks_per_worker"),
    [(200, 1000, 5000), (800, 200, 15_000)],
)
def test_a_conversation_stays_on_its_shard(
    num_conversations: int, system_tokens: int, blocks_per_worker: int
) -> None:
    """All begin with the same system prompt, which is on every shard then."""
    requests = conversations(random.Random(1), num_conversations, 6, 60, system_tokens)
    outcome = run(requests, 4, 2, blocks_per_worker)
    assert stay_rate(requests, outcome) >= 0.75
    assert outcome.largest_load <= 1.3
    together = run(requests, 1, 1, 8 * blocks_per_worker)
    assert outcome.hit_rate >= 0.9 * together.hit_rate


def test_when_a_shard_is_added_other_keys_stay() -> None:
    """Through the whole choice, with the loads of a simulation."""
    requests = conversations(random.Random(2), 200, 6, 60, 0)
    before, after = run(requests, 4, 2, 5000), run(requests, 5, 2, 5000)
    moved = sum(one != other for one, other in zip(before.shards, after.shards, strict=True))
    assert moved / len(requests) < 0.35
