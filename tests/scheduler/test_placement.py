"""Placement of a request on literal lanes."""

from dataclasses import replace

from scheduler_svc.core.placement import Demand, LaneBudget, choose_lane
from scheduler_svc.core.view import Limits

LIMITS = Limits(block_size=16, max_num_batched_tokens=64, max_num_seqs=4, watermark=0)
DEMAND = Demand(num_rows=1, num_new_blocks=3, num_uncached_tokens=40, watermark=0)


def lane(
    num_rows: int = 1, num_free_blocks: int = 100, queued: tuple[int, ...] = (), **limits: int
) -> LaneBudget:
    budget = LaneBudget(replace(LIMITS, **limits), num_rows, num_free_blocks)
    for num_tokens in queued:
        budget.queue(num_tokens)
    return budget


def test_the_lane_with_the_longest_cached_prefix_is_chosen():
    cached = replace(DEMAND, num_uncached_tokens=8)
    assert choose_lane([lane(), lane()], [DEMAND, cached]) == 1


def test_queued_tokens_count_as_much_as_uncached_ones():
    cached = replace(DEMAND, num_uncached_tokens=8)
    assert choose_lane([lane(), lane(queued=(31,))], [DEMAND, cached]) == 1
    assert choose_lane([lane(), lane(queued=(33,))], [DEMAND, cached]) == 0


def test_of_equal_lanes_the_one_with_fewer_rows_is_chosen_else_the_first():
    assert choose_lane([lane(3), lane(2)], [DEMAND] * 2) == 1
    assert choose_lane([lane(2), lane(2)], [DEMAND] * 2) == 0


def test_a_lane_without_room_is_not_chosen():
    assert choose_lane([lane(num_rows=4)], [DEMAND]) is None
    assert choose_lane([lane(num_free_blocks=2)], [DEMAND]) is None
    assert choose_lane([lane(num_free_blocks=3)], [DEMAND]) == 0
    assert choose_lane([lane(num_free_blocks=3)], [replace(DEMAND, watermark=1)]) is None
    assert choose_lane([lane(queued=(64,))], [DEMAND]) is None
    assert choose_lane([lane(queued=(63,))], [DEMAND]) == 0
    assert choose_lane([lane(num_rows=4), lane(num_rows=3)], [DEMAND] * 2) == 1


def test_a_group_needs_a_row_for_each_choice_up_to_max_num_seqs():
    assert choose_lane([lane(num_rows=2)], [replace(DEMAND, num_rows=2)]) == 0
    assert choose_lane([lane(num_rows=2)], [replace(DEMAND, num_rows=3)]) is None
    assert choose_lane([lane(num_rows=1)], [replace(DEMAND, num_rows=16)]) is None
    assert choose_lane([lane(num_rows=0)], [replace(DEMAND, num_rows=16)]) == 0


def test_an_empty_lane_accepts_anything():
    huge = Demand(num_rows=16, num_new_blocks=1000, num_uncached_tokens=16_000, watermark=10)
    assert choose_lane([lane(num_rows=0)], [huge]) == 0


def test_a_placed_request_reduces_the_budget():
    budget = lane(num_rows=2, num_free_blocks=5)
    budget.take(DEMAND)
    assert budget.cost(DEMAND) == 40 + 40 + 3
    assert not budget.has_room(DEMAND)
    assert budget.has_room(replace(DEMAND, num_new_blocks=2))


def test_long_prompts_count_by_their_chunk():
    limits = {"long_prefill_token_threshold": 20}
    assert lane(queued=(60, 60), **limits).has_room(DEMAND)
    assert not lane(queued=(60, 60, 60, 60), **limits).has_room(DEMAND)
    assert lane(queued=(60, 60), **limits).cost(DEMAND) == 120 + 40 + 1


def test_long_prompts_beyond_the_limit_do_not_count():
    limits = {"long_prefill_token_threshold": 40, "max_long_partial_prefills": 1}
    assert lane(queued=(60, 60, 60), **limits).has_room(DEMAND)
    assert not lane(queued=(60, 60, 60, 24), **limits).has_room(DEMAND)
