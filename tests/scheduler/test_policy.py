"""The policy on literal inputs: what one step runs, in which order, with which blocks."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest

from scheduler_svc.core.block_fit import fit, fit_of_prompt
from scheduler_svc.core.policy import schedule
from scheduler_svc.core.view import (
    BlockFit,
    Candidate,
    Forkable,
    LaneView,
    Limits,
    Policy,
    PreemptionMode,
    StepDecision,
    Swapped,
)

LIMITS = Limits(block_size=16, max_num_batched_tokens=64, max_num_seqs=4, watermark=0)
PREFILL_FIRST = replace(LIMITS, policy=Policy.PREFILL_FIRST)


@dataclass(eq=False)
class Row:
    """A sequence, by its name."""

    name: str
    order: tuple[int, int, int]
    num_tokens: int
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    max_num_tokens: int = 2**31
    is_abandoned: bool = False
    is_beam: bool = False
    num_lookahead_tokens: int = 0
    last_step: int = 0

    def __repr__(self) -> str:
        return self.name


def row(
    arrival: int, num_tokens: int, num_computed: int, blocks: Iterable[int], choice: int = 0
) -> Row:
    return Row(f"r{arrival}.{choice}", (0, arrival, choice), num_tokens, num_computed, [*blocks])


def decoding(arrival: int, num_tokens: int, blocks: Iterable[int], choice: int = 0) -> Row:
    return row(arrival, num_tokens, num_tokens - 1, blocks, choice)


def waiting(
    arrival: int,
    num_tokens: int,
    tag: int | None = None,
    hits: int = 0,
    free_hits: int = 0,
    rows: int = 1,
    is_new: bool = True,
) -> Candidate[Row]:
    """Candidates with equal tags have equal prompts, up to the shorter length."""
    tag = arrival if tag is None else tag
    hashes = [bytes([tag, index]) * 16 for index in range(num_tokens // 16)]
    sequence = Row(f"w{arrival}", (0, arrival, 0), num_tokens)
    return Candidate(sequence, hashes, hits, free_hits, rows, is_new)


def siblings(arrival: int, num_prompt_tokens: int, count: int) -> list[Row]:
    return [
        Row(f"s{arrival}.{choice}", (0, arrival, choice), num_prompt_tokens)
        for choice in range(1, count + 1)
    ]


def lane(
    running: Iterable[Row] = (), num_free_blocks: int = 200, num_usable: int = 1000, **more: object
) -> LaneView[Row]:
    """A view whose reference counts follow from the tables and pinned blocks."""
    running = list(running)
    references = Counter(block for one in running for block in one.block_ids)
    for group in more.get("forkable", ()):
        references.update(group.pinned_blocks or ())
    return LaneView(running, num_free_blocks, num_usable, references, **more)


def scheduled(decision: StepDecision[Row]) -> dict[str, int]:
    """Tokens of the running rows, in the order in which they were scheduled."""
    pairs = zip(decision.scheduled, decision.num_scheduled_tokens, strict=True)
    return {one.name: count for one, count in pairs}


def admitted(decision: StepDecision[Row]) -> list[tuple[str, int, int, int]]:
    """Name, hits, tokens and new blocks."""
    return [
        (one.sequence.name, one.num_hits, one.num_scheduled_tokens, one.num_new_blocks)
        for one in decision.admitted
    ]


# Order and budget


def test_decodes_precede_prefills_and_prefills_precede_new_prompts():
    running = [row(0, 100, 80, range(1, 8)), decoding(1, 20, [8, 9])]
    decision = schedule(LIMITS, lane(running, candidates=[waiting(2, 10)]))
    assert scheduled(decision) == {"r1.0": 1, "r0.0": 20}
    assert admitted(decision) == [("w2", 0, 10, 1)]


def test_prefills_that_finish_in_this_step_precede_those_that_do_not():
    running = [row(0, 200, 64, range(1, 14)), row(1, 100, 64, range(14, 21))]
    decision = schedule(LIMITS, lane(running))
    assert list(scheduled(decision).items()) == [("r1.0", 36), ("r0.0", 28)]


def test_prefills_that_finish_in_the_same_step_are_in_order():
    running = [row(1, 40, 16, range(1, 4)), row(0, 40, 16, range(4, 7))]
    assert list(scheduled(schedule(LIMITS, lane(running)))) == ["r0.0", "r1.0"]


def test_prompts_share_what_may_be_computed_of_them_beside_decodes():
    running = [decoding(0, 20, [1, 2]), row(1, 100, 64, range(3, 10))]
    view = lane(running, max_prompt_tokens=40, candidates=[waiting(2, 100), waiting(3, 100)])
    decision = schedule(LIMITS, view)
    assert scheduled(decision) == {"r0.0": 1, "r1.0": 36}
    assert admitted(decision) == [("w2", 0, 4, 7)]


def test_without_decodes_prompts_have_the_whole_budget():
    running = [row(1, 100, 64, range(3, 10))]
    view = lane(running, max_prompt_tokens=8, candidates=[waiting(2, 100)])
    for limits in (LIMITS, PREFILL_FIRST):
        decision = schedule(limits, view)
        assert scheduled(decision) == {"r1.0": 36}
        assert admitted(decision) == [("w2", 0, 28, 7)]


def test_prompts_run_without_decodes_in_the_other_policy_and_have_the_whole_budget():
    view = lane([decoding(0, 20, [1, 2])], max_prompt_tokens=8, candidates=[waiting(2, 100)])
    assert admitted(schedule(PREFILL_FIRST, view)) == [("w2", 0, 64, 7)]


def test_forks_do_not_count_as_prompts():
    group = Forkable(siblings(0, 17, 2), None, [1, 2])
    view = lane([decoding(1, 20, [3, 4])], max_prompt_tokens=1, forkable=[group])
    assert len(schedule(LIMITS, view).forked) == 2


def test_a_prompt_is_chunked_to_what_decodes_leave_of_the_budget():
    decision = schedule(LIMITS, lane([decoding(0, 20, [1, 2])], candidates=[waiting(1, 100)]))
    assert admitted(decision) == [("w1", 0, 63, 7)]
    decision = schedule(LIMITS, lane([row(1, 100, 63, range(1, 8))]))
    assert scheduled(decision) == {"r1.0": 37}


def test_a_prompt_without_remaining_budget_waits():
    decision = schedule(LIMITS, lane(candidates=[waiting(0, 64), waiting(1, 1)]))
    assert admitted(decision) == [("w0", 0, 64, 4)]


def test_no_prompt_overtakes_one_that_does_not_fit():
    view = lane(num_free_blocks=9, candidates=[waiting(0, 160), waiting(1, 10)])
    assert schedule(LIMITS, view).is_empty
    view = lane(num_free_blocks=10, candidates=[waiting(0, 160), waiting(1, 10)])
    assert admitted(schedule(LIMITS, view)) == [("w0", 0, 64, 10)]


def test_rows_are_bounded():
    running = [decoding(arrival, 20, [arrival * 2 + 1, arrival * 2 + 2]) for arrival in range(3)]
    decision = schedule(LIMITS, lane(running, candidates=[waiting(8, 4), waiting(9, 4)]))
    assert admitted(decision) == [("w8", 0, 4, 1)]


# Several rounds


def rounds_view(running: Iterable[Row], num_rounds: int, **more: object) -> LaneView[Row]:
    return lane(running, num_rounds=num_rounds, **more)


def test_decodes_run_the_rounds_of_the_view_up_to_their_last_tokens():
    running = [decoding(0, 20, [1, 2]), decoding(1, 20, [3, 4]), decoding(2, 20, [5, 6])]
    running[1].max_num_tokens, running[2].max_num_tokens = 22, 21
    decision = schedule(LIMITS, rounds_view(running, 4))
    assert decision.only_decodes
    assert decision.num_rounds == [4, 2, 1]
    assert scheduled(decision) == {"r0.0": 1, "r1.0": 1, "r2.0": 1}
    assert schedule(LIMITS, lane(running)).num_rounds == []
    running[0].max_num_tokens = running[1].max_num_tokens = 21
    assert schedule(LIMITS, rounds_view(running, 4)).num_rounds == []


def test_blocks_of_all_rounds_are_appended_at_once():
    # Of tokens 15, 16 and 17 the first two are written; of 16, 17 and 18 all but the last.
    short, long = decoding(0, 15, [1]), decoding(1, 16, [2])
    assert schedule(LIMITS, rounds_view([short, long], 2)).appends == [(long, 1)]
    assert schedule(LIMITS, rounds_view([short, long], 3)).appends == [(short, 1), (long, 1)]
    short.max_num_tokens = 17
    assert schedule(LIMITS, rounds_view([short, long], 3)).appends == [(long, 1)]
    ahead = replace(LIMITS, num_lookahead_slots=1)
    assert schedule(ahead, rounds_view([short, long], 3)).appends == [(short, 1), (long, 1)]


def test_rounds_have_blocks_for_the_look_ahead_of_each_up_to_the_last_token():
    one = decoding(0, 16, [1])
    one.num_lookahead_tokens = 10
    # Of 16 tokens, 3 rounds more, and 4 * 10 of the look-ahead.
    assert schedule(LIMITS, rounds_view([one], 4)).appends == [(one, 3)]
    one.max_num_tokens = 40
    assert schedule(LIMITS, rounds_view([one], 4)).appends == [(one, 2)]
    one.max_num_tokens = 17
    assert schedule(LIMITS, rounds_view([one], 4)).appends == [(one, 1)]


def test_rows_have_blocks_for_the_look_ahead_of_plans_in_flight_too():
    one, two = decoding(0, 16, [1]), decoding(1, 32, [2, 3, 4])
    one.num_lookahead_tokens = two.num_lookahead_tokens = 8
    assert schedule(LIMITS, lane([one, two])).appends == [(one, 1)]
    # The tokens of two plans are counted, but not the 8 that each of them may have added.
    view = lane([one, two], num_rounds_in_flight=2)
    assert schedule(LIMITS, view).appends == [(one, 2), (two, 1)]
    one.max_num_tokens, two.max_num_tokens = 20, 48
    assert schedule(LIMITS, view).appends == [(one, 1)]
    decision = schedule(LIMITS, replace(view, num_free_blocks=0))
    assert (decision.preempted, decision.appends) == ([], [])


def test_no_row_is_preempted_for_rounds():
    running = [decoding(0, 16, [1]), decoding(1, 16, [2])]
    decision = schedule(LIMITS, rounds_view(running, 2, num_free_blocks=1))
    assert (decision.preempted, decision.appends, decision.num_rounds) == ([], [], [])
    assert scheduled(decision) == {"r0.0": 1, "r1.0": 1}


def test_a_step_with_anything_but_decodes_has_one_round():
    one = decoding(0, 20, [1, 2])
    for view in (
        rounds_view([one, row(1, 40, 16, [3, 4, 5])], 4),
        rounds_view([one], 4, candidates=[waiting(1, 10)]),
        rounds_view([one], 4, swapped=[Swapped([decoding(1, 20, [1, 2])], 2)]),
        rounds_view([one], 4, forkable=[Forkable(siblings(0, 19, 1), one, None)]),
    ):
        assert schedule(LIMITS, view).num_rounds == []


# Blocks


def test_a_decode_takes_a_block_exactly_where_the_last_one_is_full():
    assert schedule(LIMITS, lane([decoding(0, 16, [1])])).appends == []
    one = decoding(0, 17, [1])
    assert schedule(LIMITS, lane([one])).appends == [(one, 1)]


def test_a_row_is_preempted_if_one_free_block_is_missing():
    running = [decoding(0, 17, [1]), decoding(1, 33, [2, 3])]
    assert schedule(LIMITS, lane(running, num_free_blocks=2)).preempted == []
    decision = schedule(LIMITS, lane(running, num_free_blocks=1))
    assert decision.preempted == [running[1]]
    assert decision.appends == [(running[0], 1)]


def test_the_watermark_binds_new_requests_only():
    limits = replace(LIMITS, watermark=2)
    assert schedule(limits, lane(num_free_blocks=2, candidates=[waiting(0, 16)])).is_empty
    assert schedule(limits, lane(num_free_blocks=3, candidates=[waiting(0, 16)])).admitted
    again = waiting(0, 16, is_new=False)
    assert schedule(limits, lane(num_free_blocks=1, candidates=[again])).admitted
    one = decoding(0, 17, [1])
    assert schedule(limits, lane([one], num_free_blocks=1)).appends == [(one, 1)]


def test_hits_on_free_blocks_cost_blocks_and_hits_on_held_ones_do_not():
    view = lane(num_free_blocks=2, candidates=[waiting(0, 48, hits=2, free_hits=2)])
    assert schedule(LIMITS, view).is_empty
    view = lane(num_free_blocks=3, candidates=[waiting(0, 48, hits=2, free_hits=2)])
    assert admitted(schedule(LIMITS, view)) == [("w0", 2, 16, 1)]
    view = lane(num_free_blocks=1, candidates=[waiting(0, 48, hits=2)])
    assert admitted(schedule(LIMITS, view)) == [("w0", 2, 16, 1)]


def test_the_last_token_is_computed_whatever_the_cache_holds():
    view = lane(candidates=[waiting(0, 48, hits=3)])
    assert admitted(schedule(LIMITS, view)) == [("w0", 2, 16, 1)]
    view = lane(candidates=[waiting(0, 49, hits=3)])
    assert admitted(schedule(LIMITS, view)) == [("w0", 3, 1, 1)]


def test_a_prompt_hits_blocks_that_an_earlier_one_fills_in_the_same_step():
    limits = replace(LIMITS, max_num_batched_tokens=1024)
    view = lane(candidates=[waiting(0, 100, tag=7), waiting(1, 100, tag=7)])
    assert admitted(schedule(limits, view)) == [("w0", 0, 100, 7), ("w1", 6, 4, 1)]


def test_planned_blocks_are_hit_after_cached_ones():
    limits = replace(LIMITS, max_num_batched_tokens=1024)
    first = waiting(0, 100, tag=7, hits=2, free_hits=2)
    second = waiting(1, 100, tag=7, hits=2, free_hits=2)
    assert admitted(schedule(limits, lane(candidates=[first, second]))) == [
        ("w0", 2, 68, 5),
        ("w1", 6, 4, 1),
    ]


def test_what_a_chunk_does_not_fill_is_not_hit():
    limits = replace(LIMITS, max_num_batched_tokens=70, long_prefill_token_threshold=40)
    view = lane(candidates=[waiting(0, 100, tag=7), waiting(1, 100, tag=7)])
    # 40 tokens fill two blocks.
    assert admitted(schedule(limits, view)) == [("w0", 0, 40, 7), ("w1", 2, 30, 5)]


def test_a_prompt_never_fits_if_it_needs_more_than_the_watermark_leaves():
    limits = replace(LIMITS, watermark=2)
    assert fit_of_prompt(128, limits, num_usable=10) is BlockFit.OK
    assert fit_of_prompt(129, limits, num_usable=10) is BlockFit.NEVER
    limits = replace(limits, num_lookahead_slots=1)
    assert fit_of_prompt(128, limits, num_usable=10) is BlockFit.NEVER


@pytest.mark.parametrize(
    ("num_needed", "wanted"),
    [(3, BlockFit.OK), (4, BlockFit.LATER), (8, BlockFit.LATER), (9, BlockFit.NEVER)],
)
def test_fit(num_needed, wanted):
    assert fit(num_needed, num_free=5, num_usable=10, watermark=2) is wanted


# Long and partial prefills


def test_long_prompts_are_chunked_to_the_threshold_beside_others():
    limits = replace(LIMITS, max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    prompts = [waiting(arrival, 800) for arrival in range(3)]
    counts = [entry[2] for entry in admitted(schedule(limits, lane(candidates=prompts)))]
    assert counts == [400, 400, 224]
    running = [
        row(0, 800, 400, range(1, 51)),
        row(1, 800, 400, range(51, 101)),
        row(2, 800, 224, range(101, 151)),
    ]
    assert scheduled(schedule(limits, lane(running))) == {"r0.0": 400, "r1.0": 400, "r2.0": 224}
    running = [
        decoding(0, 801, range(1, 52)),
        decoding(1, 801, range(52, 103)),
        row(2, 800, 448, range(103, 153)),
    ]
    assert scheduled(schedule(limits, lane(running))) == {"r0.0": 1, "r1.0": 1, "r2.0": 352}


def test_a_prompt_alone_is_not_chunked_to_the_threshold():
    limits = replace(LIMITS, long_prefill_token_threshold=10)
    running = [decoding(0, 20, [1, 2])]
    decision = schedule(limits, lane(running, candidates=[waiting(1, 50)]))
    assert admitted(decision) == [("w1", 0, 50, 4)]
    assert scheduled(schedule(limits, lane([row(1, 100, 50, range(1, 8))]))) == {"r1.0": 50}


def test_partial_prefills_are_bounded():
    limits = replace(LIMITS, long_prefill_token_threshold=20, max_num_partial_prefills=1)
    view = lane(candidates=[waiting(0, 50), waiting(1, 50), waiting(2, 5)])
    # The second one would be partial, too, and the third must not overtake it.
    assert admitted(schedule(limits, view)) == [("w0", 0, 20, 4)]
    view = lane([row(0, 90, 20, range(1, 7))], candidates=[waiting(1, 15), waiting(2, 50)])
    decision = schedule(limits, view)
    assert scheduled(decision) == {"r0.0": 20}
    assert admitted(decision) == [("w1", 0, 15, 1)]


def test_a_short_prompt_overtakes_a_long_one_only_beyond_the_limit_of_long_ones():
    limits = replace(LIMITS, long_prefill_token_threshold=20, max_long_partial_prefills=1)
    view = lane(candidates=[waiting(0, 50), waiting(1, 50), waiting(2, 5)])
    assert admitted(schedule(limits, view)) == [("w0", 0, 20, 4), ("w2", 0, 5, 1)]
    # Here the long one only lacks blocks.
    view = lane(num_free_blocks=3, candidates=[waiting(1, 50), waiting(2, 5)])
    assert schedule(limits, view).is_empty


def test_hits_make_a_long_prompt_short():
    limits = replace(LIMITS, long_prefill_token_threshold=20, max_long_partial_prefills=1)
    view = lane(candidates=[waiting(0, 50), waiting(1, 50, hits=2)])
    assert admitted(schedule(limits, view)) == [("w0", 0, 20, 4), ("w1", 2, 18, 2)]


# Groups


def test_a_group_needs_a_row_for_each_choice():
    one = [decoding(0, 20, [1, 2])]
    assert schedule(LIMITS, lane(one, candidates=[waiting(1, 5, rows=3)])).admitted
    assert not schedule(LIMITS, lane(one, candidates=[waiting(1, 5, rows=4)])).admitted


def test_a_group_with_more_choices_than_rows_starts_on_an_empty_lane():
    view = lane(candidates=[waiting(0, 5, rows=16), waiting(1, 5)])
    assert admitted(schedule(LIMITS, view)) == [("w0", 0, 5, 1)]


def test_rows_are_reserved_for_siblings_whose_prompt_is_not_computed_yet():
    view = lane([row(0, 100, 40, range(1, 8))], num_reserved_rows=3, candidates=[waiting(1, 5)])
    assert schedule(LIMITS, view).admitted == []
    assert schedule(LIMITS, replace(view, num_reserved_rows=2)).admitted


def test_siblings_are_forked_with_one_block_and_one_token_each():
    source = decoding(0, 41, [1, 2, 3])
    group = Forkable(siblings(0, 40, 3), source, None)
    decision = schedule(LIMITS, lane([source], num_free_blocks=3, forkable=[group]))
    assert decision.forked == [(group, sibling) for sibling in group.siblings]
    assert scheduled(decision) == {"r0.0": 1}


def test_siblings_get_rows_as_they_become_free_and_are_not_overtaken():
    source = decoding(0, 41, [1, 2, 3])
    group = Forkable(siblings(0, 40, 5), source, None)
    view = lane([source], forkable=[group], candidates=[waiting(1, 5)])
    decision = schedule(LIMITS, view)
    assert [one.name for _, one in decision.forked] == ["s0.1", "s0.2", "s0.3"]
    assert decision.admitted == []
    group = Forkable(siblings(0, 40, 1), source, None)
    view = lane([source], num_free_blocks=0, forkable=[group], candidates=[waiting(1, 5)])
    assert schedule(LIMITS, view).forked == []


def test_siblings_are_forked_from_the_blocks_that_their_group_holds():
    group = Forkable(siblings(0, 40, 2), None, [1, 2, 3])
    decision = schedule(LIMITS, lane(num_free_blocks=1, forkable=[group]))
    assert [one.name for _, one in decision.forked] == ["s0.1"]


def test_a_hold_is_dropped_before_a_row_is_preempted():
    one = decoding(1, 17, [4])
    group = Forkable(siblings(0, 40, 2), None, [1, 2, 3])
    decision = schedule(LIMITS, lane([one], num_free_blocks=0, forkable=[group]))
    assert decision.cancelled_forks == [group]
    assert decision.preempted == []
    assert decision.appends == [(one, 1)]


def test_siblings_of_a_preempted_source_are_not_forked():
    first, source = decoding(0, 17, [1]), decoding(1, 41, [2, 3, 4])
    group = Forkable(siblings(1, 40, 2), source, None)
    decision = schedule(LIMITS, lane([first, source], num_free_blocks=0, forkable=[group]))
    assert decision.preempted == [source]
    assert decision.cancelled_forks == [group]
    assert decision.forked == []


def test_a_hold_without_room_for_forks_is_dropped_if_nothing_runs():
    group = Forkable(siblings(0, 40, 2), None, [1, 2, 3])
    decision = schedule(LIMITS, lane(num_free_blocks=0, forkable=[group]))
    assert decision.cancelled_forks == [group]


# Preemption


def short_of_blocks(num_host_blocks: int = 100, **more: object) -> LaneView[Row]:
    """A single sequence and, after it, a group of two that share their first block; one block
    is missing."""
    first = decoding(0, 17, [1])
    group = [decoding(1, 20, [2, 3], choice=0), decoding(1, 20, [2, 4], choice=1)]
    return lane([first, *group], 0, num_free_host_blocks=num_host_blocks, **more)


def test_the_last_in_order_is_preempted_whatever_its_position():
    running = [decoding(2, 20, [1, 2]), decoding(0, 17, [3]), decoding(1, 20, [4, 5])]
    decision = schedule(LIMITS, lane(running, num_free_blocks=0))
    assert decision.preempted == [running[0]]


def test_rows_whose_clients_have_disconnected_are_preempted_first():
    running = [decoding(0, 17, [1]), decoding(1, 20, [2, 3]), decoding(2, 20, [4, 5])]
    running[1].is_abandoned = True
    assert schedule(LIMITS, lane(running, num_free_blocks=0)).preempted == [running[1]]
    running[0].is_abandoned = True
    running[1].is_abandoned = False
    # It frees the block that it needs, and then nothing is missing.
    assert schedule(LIMITS, lane(running, num_free_blocks=0)).preempted == [running[0]]


def test_order_is_priority_first():
    urgent, late = decoding(5, 17, [1]), decoding(0, 20, [2, 3])
    late.order = (1, 0, 0)
    assert schedule(LIMITS, lane([urgent, late], num_free_blocks=0)).preempted == [late]


def test_prefills_are_preempted_too_and_take_nothing_of_the_budget():
    first, prefill = decoding(0, 17, [1]), row(1, 100, 32, range(2, 9))
    decision = schedule(LIMITS, lane([first, prefill], num_free_blocks=0))
    assert decision.preempted == [prefill]
    assert scheduled(decision) == {"r0.0": 1}


def test_as_many_rows_are_preempted_as_needed():
    running = [decoding(arrival, 17, [arrival + 1]) for arrival in range(4)]
    decision = schedule(LIMITS, lane(running, num_free_blocks=0))
    assert decision.preempted == [running[3], running[2]]
    assert decision.appends == [(running[0], 1), (running[1], 1)]


def test_shared_blocks_are_not_freed():
    shared = [1, 2]
    running = [
        decoding(0, 49, [*shared, 3]),
        decoding(1, 40, [*shared, 4]),
        decoding(2, 32, shared),
    ]
    decision = schedule(LIMITS, lane(running, num_free_blocks=0))
    assert decision.preempted == [running[2], running[1]]


def test_a_row_that_runs_alone_without_free_blocks_is_preempted():
    one = decoding(0, 17, [1])
    decision = schedule(LIMITS, lane([one], num_free_blocks=0))
    assert decision.preempted == [one]
    assert decision.scheduled == []


def test_a_group_of_which_several_run_is_swapped_as_a_whole():
    view = short_of_blocks()
    decision = schedule(LIMITS, view)
    assert decision.swapped_out == [list(view.running[1:])]
    assert decision.preempted == []


def test_a_group_of_one_is_recomputed():
    running = [decoding(0, 17, [1]), decoding(1, 20, [2, 3])]
    decision = schedule(LIMITS, lane(running, 0, num_free_host_blocks=100))
    assert decision.preempted == [running[1]]


def test_a_group_that_the_host_cannot_hold_is_recomputed_from_its_last_choice_on():
    # It has three distinct blocks.
    assert schedule(LIMITS, short_of_blocks(num_host_blocks=3)).swapped_out
    view = short_of_blocks(num_host_blocks=2)
    decision = schedule(LIMITS, view)
    assert decision.swapped_out == []
    assert decision.preempted == [view.running[2]]


@pytest.mark.parametrize("mode", [PreemptionMode.AUTO, PreemptionMode.SWAP])
def test_the_rest_of_a_group_is_not_swapped_when_a_sequence_of_it_was_recomputed(mode):
    running = [decoding(0, 17, [1]), decoding(1, 17, [2])]
    running += [decoding(2, 20, [3, 4 + choice], choice=choice) for choice in range(2)]
    limits = replace(LIMITS, preemption_mode=mode)
    decision = schedule(limits, lane(running, 0, num_free_host_blocks=2))
    assert decision.preempted == [running[3], running[2]]
    assert decision.swapped_out == []


def test_forced_modes():
    recompute = replace(LIMITS, preemption_mode=PreemptionMode.RECOMPUTE)
    view = short_of_blocks()
    assert schedule(recompute, view).preempted == [view.running[2]]
    swap = replace(LIMITS, preemption_mode=PreemptionMode.SWAP)
    running = [decoding(0, 17, [1]), decoding(1, 20, [2, 3])]
    view = lane(running, 0, num_free_host_blocks=2)
    assert schedule(swap, view).swapped_out == [[running[1]]]
    view = lane(running, 0, num_free_host_blocks=1)
    assert schedule(swap, view).preempted == [running[1]]


@pytest.mark.parametrize("mode", PreemptionMode)
def test_a_group_that_runs_alone_is_recomputed(mode):
    group = [decoding(0, 17, [1], choice=0), decoding(0, 17, [2], choice=1)]
    limits = replace(LIMITS, preemption_mode=mode)
    decision = schedule(limits, lane(group, 0, num_free_host_blocks=100))
    assert decision.preempted == [group[1]]
    assert decision.swapped_out == []


def test_no_prompt_is_admitted_in_a_step_that_preempts():
    running = [decoding(0, 17, [1]), decoding(1, 20, [2, 3])]
    decision = schedule(LIMITS, lane(running, 0, candidates=[waiting(2, 5)]))
    assert decision.preempted == [running[1]]
    assert decision.admitted == []


# Swapped groups


def swapped(arrival: int = 0, num_tokens: int = 20, count: int = 2) -> Swapped[Row]:
    """Each has two host blocks, the first of which all share."""
    rows = [
        decoding(arrival, num_tokens, [0, choice + 1], choice=choice) for choice in range(count)
    ]
    return Swapped(rows, num_blocks=count + 1)


def test_a_swapped_in_group_computes_a_token_each():
    group = swapped()
    decision = schedule(LIMITS, lane(num_free_blocks=3, swapped=[group]))
    [back] = decision.swapped_in
    assert back.group is group
    assert back.num_scheduled_tokens == [1, 1]
    assert back.num_new_blocks == [0, 0]
    assert schedule(LIMITS, lane(num_free_blocks=2, swapped=[group])).swapped_in == []


def test_a_swapped_group_takes_the_blocks_that_its_next_tokens_need():
    group = swapped(num_tokens=33)
    [back] = schedule(LIMITS, lane(num_free_blocks=5, swapped=[group])).swapped_in
    assert back.num_new_blocks == [1, 1]
    assert schedule(LIMITS, lane(num_free_blocks=4, swapped=[group])).swapped_in == []


def test_a_partial_prompt_swapped_in_continues_in_the_next_step():
    group = Swapped([row(0, 40, 16, [0, 1, 2])], 3)
    [back] = schedule(LIMITS, lane(swapped=[group])).swapped_in
    assert back.num_scheduled_tokens == [0]


def test_swapped_groups_precede_new_prompts_and_are_not_overtaken():
    view = lane(swapped=[swapped(5)], candidates=[waiting(1, 5)])
    decision = schedule(LIMITS, view)
    assert decision.swapped_in
    assert decision.admitted
    decision = schedule(LIMITS, replace(view, num_free_blocks=2))
    assert decision.is_empty
    rows = [decoding(arrival, 20, [2 * arrival, 2 * arrival + 1]) for arrival in range(6, 9)]
    decision = schedule(LIMITS, replace(view, running=rows))
    assert decision.swapped_in == decision.admitted == []


def test_no_group_is_swapped_in_in_a_step_that_preempts():
    decision = schedule(LIMITS, short_of_blocks(swapped=[swapped(9, count=1)]))
    assert decision.swapped_out
    assert decision.swapped_in == []


def test_a_swapped_group_too_large_for_the_pool_is_discarded():
    group, later = swapped(0), swapped(1, count=1)
    view = lane(num_free_blocks=2, num_usable=2, swapped=[group, later])
    decision = schedule(LIMITS, view)
    assert decision.discarded == [group]
    assert [back.group for back in decision.swapped_in] == [later]


def test_no_prompt_is_admitted_in_a_step_that_discards_a_group():
    view = lane(num_free_blocks=2, num_usable=2, swapped=[swapped(0)], candidates=[waiting(1, 5)])
    decision = schedule(LIMITS, view)
    assert decision.discarded
    assert decision.admitted == []
    assert schedule(LIMITS, replace(view, swapped=[])).admitted


# Prefill first


def test_prefill_first_never_mixes():
    running = [decoding(0, 20, [1, 2]), row(1, 100, 64, range(3, 10))]
    decision = schedule(PREFILL_FIRST, lane(running, candidates=[waiting(2, 10)]))
    assert scheduled(decision) == {"r1.0": 36}
    assert admitted(decision) == [("w2", 0, 10, 1)]


def test_prefill_first_decodes_if_no_prompt_fits():
    one = decoding(0, 20, [1, 2])
    view = lane([one], num_free_blocks=0, candidates=[waiting(1, 10)])
    decision = schedule(PREFILL_FIRST, view)
    assert scheduled(decision) == {"r0.0": 1}
    assert decision.admitted == []


def test_prefill_first_forks_in_a_step_of_decodes():
    source = decoding(0, 41, [1, 2, 3])
    group = Forkable(siblings(0, 40, 1), source, None)
    view = lane([source], forkable=[group])
    assert schedule(PREFILL_FIRST, view).forked
    decision = schedule(PREFILL_FIRST, replace(view, candidates=[waiting(1, 10)]))
    assert decision.admitted
    assert decision.forked == []


def test_prefill_first_admits_no_prompt_while_a_group_is_swapped():
    view = lane([decoding(0, 20, [1, 2])], swapped=[swapped(1)], candidates=[waiting(2, 10)])
    decision = schedule(PREFILL_FIRST, view)
    assert scheduled(decision) == {"r0.0": 1}
    assert decision.swapped_in
    assert decision.admitted == []


# Look-ahead


def test_lookahead_slots_count_in_every_need_of_a_step_with_decodes():
    limits = replace(LIMITS, num_lookahead_slots=4)
    one = decoding(0, 13, [1])
    decision = schedule(limits, lane([one], candidates=[waiting(1, 14)]))
    assert decision.appends == [(one, 1)]
    assert admitted(decision) == [("w1", 0, 14, 2)]
    assert schedule(limits, lane([decoding(0, 12, [1])])).appends == []


def test_lookahead_slots_do_not_count_in_a_step_of_prefills_only():
    limits = replace(LIMITS, num_lookahead_slots=4)
    assert admitted(schedule(limits, lane(candidates=[waiting(1, 14)]))) == [("w1", 0, 14, 1)]


def test_no_slots_are_reserved_beyond_the_longest_sequence():
    limits = replace(LIMITS, num_lookahead_slots=4, max_model_len=32)
    assert schedule(limits, lane([decoding(0, 31, [1, 2])], num_free_blocks=0)).appends == []
    one = decoding(0, 13, [1])
    assert schedule(limits, lane([one], num_free_blocks=1)).appends == [(one, 1)]
    assert fit_of_prompt(31, limits, num_usable=2) is BlockFit.OK
    again = waiting(1, 31)
    view = lane([decoding(0, 10, [3])], num_free_blocks=2, candidates=[again])
    assert admitted(schedule(limits, view)) == [("w1", 0, 31, 2)]
