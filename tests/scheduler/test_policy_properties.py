"""Invariants of any decision on any view."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.policy import schedule
from scheduler_svc.core.view import (
    Candidate,
    Forkable,
    LaneView,
    Limits,
    Policy,
    PreemptionMode,
    StepDecision,
    Swapped,
)

MAX_ROWS = 6


@dataclass(eq=False)
class Row:
    order: tuple[int, int, int]
    num_tokens: int
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    max_num_tokens: int = 2**31
    is_abandoned: bool = False
    is_beam: bool = False
    num_lookahead_tokens: int = 0
    last_step: int = 0

    @property
    def remaining(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    def __repr__(self) -> str:
        return f"{self.order}: {self.num_computed_tokens}/{self.num_tokens} in {self.block_ids}"


def ceil(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


limits = st.builds(
    Limits,
    block_size=st.integers(1, 4),
    max_num_batched_tokens=st.integers(MAX_ROWS, 30),
    max_num_seqs=st.integers(1, MAX_ROWS),
    watermark=st.integers(0, 2),
    policy=st.sampled_from(Policy),
    preemption_mode=st.sampled_from(PreemptionMode),
    max_num_partial_prefills=st.none() | st.integers(1, 2),
    max_long_partial_prefills=st.none() | st.integers(1, 2),
    long_prefill_token_threshold=st.sampled_from([0, 3, 8]),
    num_lookahead_slots=st.sampled_from([0, 0, 1, 5]),
)


class Pool:
    """Allocates consecutive block numbers."""

    def __init__(self) -> None:
        self.next = 1

    def take(self, count: int) -> list[int]:
        self.next += count
        return list(range(self.next - count, self.next))


@st.composite
def running_groups(draw: st.DrawFn, limits: Limits, pool: Pool) -> list[list[Row]]:
    """Rows that decode or compute their prompts; those of a group may share a first part."""
    groups = []
    num_rows = draw(st.integers(0, limits.max_num_seqs))
    arrival = 0
    while num_rows:
        count = draw(st.integers(1, min(num_rows, 3)))
        shared = pool.take(draw(st.integers(0, 2)))
        priority = draw(st.integers(0, 1))
        is_abandoned = draw(st.booleans())
        group = []
        for choice in range(count):
            num_tokens = draw(st.integers(max(1, len(shared) * limits.block_size), 12))
            is_decode = draw(st.booleans()) or count > 1
            computed = num_tokens - 1 if is_decode else draw(st.integers(0, num_tokens - 1))
            # A decode has the blocks of its earlier tokens, or more; a prompt has all of its own.
            least = ceil(computed, limits.block_size) if is_decode else 0
            num_blocks = max(
                len(shared),
                draw(st.integers(least, ceil(num_tokens, limits.block_size)))
                if is_decode
                else ceil(num_tokens, limits.block_size),
            )
            blocks = [*shared, *pool.take(num_blocks - len(shared))]
            row = Row((priority, arrival, choice), num_tokens, computed, blocks)
            row.is_abandoned = is_abandoned
            row.max_num_tokens = num_tokens + draw(st.integers(1, 6))
            row.last_step = draw(st.integers(0, 9))
            row.num_lookahead_tokens = draw(st.sampled_from([0, 0, 1, 9]))
            group.append(row)
        groups.append(group)
        num_rows -= count
        arrival += 1
    return groups


@st.composite
def swapped_groups(draw: st.DrawFn, limits: Limits) -> Swapped[Row]:
    host = Pool()
    shared = host.take(draw(st.integers(0, 1)))
    rows = []
    for choice in range(draw(st.integers(1, 2))):
        num_tokens = draw(st.integers(max(1, len(shared) * limits.block_size), 12))
        blocks = [*shared, *host.take(ceil(num_tokens, limits.block_size) - len(shared))]
        rows.append(Row((0, 50, choice), num_tokens, num_tokens - 1, blocks))
    return Swapped(rows, host.next - 1)


@st.composite
def candidates(draw: st.DrawFn, limits: Limits, arrival: int) -> Candidate[Row]:
    num_tokens = draw(st.integers(1, 40))
    tag = draw(st.integers(0, 2))
    hashes = [bytes([tag, index]) for index in range(num_tokens // limits.block_size)]
    num_hits = draw(st.integers(0, len(hashes)))
    return Candidate(
        Row((0, 100 + arrival, 0), num_tokens),
        hashes,
        num_hits,
        draw(st.integers(0, num_hits)),
        draw(st.sampled_from([1, 1, 2, 16])),
        draw(st.booleans()),
    )


@st.composite
def forkables(draw: st.DrawFn, groups: list[list[Row]], pool: Pool) -> list[Forkable[Row]]:
    found = []
    for group in groups:
        source = group[0]
        if len(group) == 1 and source.remaining == 1 and source.block_ids and draw(st.booleans()):
            siblings = [
                Row((*source.order[:2], choice), source.num_tokens - 1 or 1)
                for choice in range(1, draw(st.integers(2, 4)))
            ]
            found.append(Forkable(siblings, source, None))
    if draw(st.booleans()):
        siblings = [Row((0, 40, choice), 5) for choice in range(1, draw(st.integers(2, 4)))]
        found.append(Forkable(siblings, None, pool.take(draw(st.integers(1, 3)))))
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[Limits, LaneView[Row]]:
    bounds = draw(limits)
    pool = Pool()
    groups = draw(running_groups(bounds, pool))
    running = draw(st.permutations([one for group in groups for one in group]))
    forkable = draw(forkables(groups, pool))
    references = Counter(block for one in running for block in one.block_ids)
    for group in forkable:
        references.update(group.pinned_blocks or ())
    num_free = draw(st.integers(0, 12))
    arrivals = range(draw(st.integers(0, 3)))
    swapped = [draw(swapped_groups(bounds)) for _ in range(draw(st.integers(0, 2)))]
    num_micro_batches = draw(st.sampled_from([1, 1, 2, 3]))
    in_flight = [one for one in running if num_micro_batches > 1 and draw(st.booleans())]
    return bounds, LaneView(
        running=running,
        num_free_blocks=num_free,
        num_usable_blocks=len(references) + num_free,
        num_rounds_in_flight=draw(st.sampled_from([0, 0, 1, 4])),
        references=references,
        forkable=forkable,
        swapped=swapped,
        num_free_host_blocks=draw(st.sampled_from([0, 2, 50])),
        candidates=[draw(candidates(bounds, arrival)) for arrival in arrivals],
        num_reserved_rows=draw(st.sampled_from([0, 0, 2])),
        max_prompt_tokens=draw(st.sampled_from([2**31, 0, 1, 5])),
        num_rounds=draw(st.sampled_from([1, 2, 5])) if num_micro_batches == 1 else 1,
        num_micro_batches=num_micro_batches,
        in_flight=frozenset(in_flight),
    )


def victims(decision: StepDecision[Row]) -> list[Row]:
    return [*decision.preempted, *(one for group in decision.swapped_out for one in group)]


def the_budget_of_tokens_is_kept(
    limits: Limits, view: LaneView[Row], decision: StepDecision[Row]
) -> None:
    num_tokens = sum(decision.num_scheduled_tokens) + len(decision.forked)
    num_tokens += sum(sum(back.num_scheduled_tokens) for back in decision.swapped_in)
    num_tokens += sum(entry.num_scheduled_tokens for entry in decision.admitted)
    assert num_tokens <= limits.max_num_batched_tokens


def prompts_beside_decodes_keep_their_share(
    limits: Limits, view: LaneView[Row], decision: StepDecision[Row]
) -> None:
    counts = decision.num_scheduled_tokens[decision.num_decodes :]
    num_tokens = sum(counts) + sum(entry.num_scheduled_tokens for entry in decision.admitted)
    in_stages = limits.policy is Policy.CHUNKED and any(
        one.remaining == 1 for one in view.in_flight
    )
    if decision.num_decodes or in_stages:
        assert num_tokens <= view.max_prompt_tokens


def every_sequence_has_a_row(
    limits: Limits, view: LaneView[Row], decision: StepDecision[Row]
) -> None:
    num_rows = len(view.running) - len(victims(decision)) + len(decision.forked)
    num_rows += sum(len(back.group.sequences) for back in decision.swapped_in)
    num_rows += len(decision.admitted)
    assert num_rows <= limits.max_num_seqs


def no_block_is_given_twice(
    limits: Limits, view: LaneView[Row], decision: StepDecision[Row]
) -> None:
    references = Counter(view.references)
    for one in victims(decision):
        references.subtract(one.block_ids)
    for group in decision.cancelled_forks:
        references.subtract(group.pinned_blocks or ())
    assert min(references.values(), default=0) >= 0
    num_free = view.num_usable_blocks - sum(count > 0 for count in references.values())
    num_taken = sum(count for _, count in decision.appends) + len(decision.forked)
    for back in decision.swapped_in:
        num_taken += back.group.num_blocks + sum(back.num_new_blocks)
    by_sequence = {one.sequence: one for one in view.candidates}
    for entry in decision.admitted:
        num_taken += entry.num_new_blocks + by_sequence[entry.sequence].num_free_hits
    assert num_taken <= num_free


def every_sequence_has_the_blocks_that_the_step_writes(
    limits: Limits, view: LaneView[Row], decision: StepDecision[Row]
) -> None:
    appended = dict(decision.appends)
    counts = decision.num_rounds or decision.num_scheduled_tokens
    for one, count in zip(decision.scheduled, counts, strict=True):
        num_blocks = len(one.block_ids) + appended.get(one, 0)
        assert ceil(one.num_computed_tokens + count, limits.block_size) <= num_blocks
    for back in decision.swapped_in:
        for one, count in zip(back.group.sequences, back.num_new_blocks, strict=True):
            assert ceil(one.num_tokens, limits.block_size) <= len(one.block_ids) + count
    for entry in decision.admitted:
        num_blocks = entry.num_hits + entry.num_new_blocks
        assert ceil(entry.sequence.num_tokens, limits.block_size) <= num_blocks


def preempted_rows_are_last_in_order_and_do_not_run(
    limits: Limits, view: LaneView[Row], decision: StepDecision[Row]
) -> None:
    preempted = victims(decision)
    assert len(set(preempted)) == len(preempted)
    in_order = sorted(view.running, key=lambda one: (one.is_abandoned, one.order))
    assert set(preempted) == set(in_order[len(in_order) - len(preempted) :])
    busy = {*decision.scheduled, *(one for one, _ in decision.appends)}
    busy |= {group.source for group, _ in decision.forked}
    assert busy.isdisjoint(preempted)
    if preempted:
        assert not decision.admitted
        assert not decision.swapped_in
        # No work is lost while blocks could be unpinned instead.
        assert all(
            group in decision.cancelled_forks for group in view.forkable if group.pinned_blocks
        )


def decodes_run_or_are_preempted_unless_the_step_is_for_prompts(
    limits: Limits, view: LaneView[Row], decision: StepDecision[Row]
) -> None:
    if view.num_micro_batches > 1:
        return
    decodes = {one for one in view.running if one.remaining == 1}
    done = decodes & {*decision.scheduled, *victims(decision)}
    num_prompts = len(decision.scheduled) - len(decodes & set(decision.scheduled))
    if limits.policy is Policy.CHUNKED:
        assert done == decodes
    elif num_prompts or decision.admitted:
        assert not done
        assert not decision.forked
        assert not decision.swapped_in
    else:
        assert done == decodes
    assert set(decision.scheduled[: decision.num_decodes]) == decodes & set(decision.scheduled)


def rounds_are_of_decodes_alone_and_end_with_their_last_tokens(
    limits: Limits, view: LaneView[Row], decision: StepDecision[Row]
) -> None:
    if decision.num_rounds:
        assert decision.only_decodes
        assert decision.num_scheduled_tokens == [1] * len(decision.scheduled)
        for one, count in zip(decision.scheduled, decision.num_rounds, strict=True):
            assert 1 <= count <= view.num_rounds
            assert one.num_tokens + count <= one.max_num_tokens


def chunks_are_parts_of_the_remaining_tokens(
    limits: Limits, view: LaneView[Row], decision: StepDecision[Row]
) -> None:
    assert len(set(decision.scheduled)) == len(decision.scheduled)
    for one, count in zip(decision.scheduled, decision.num_scheduled_tokens, strict=True):
        assert 0 < count <= one.remaining
    for entry in decision.admitted:
        remaining = entry.sequence.num_tokens - entry.num_hits * limits.block_size
        assert 0 < entry.num_scheduled_tokens <= remaining


def only_long_prompts_beyond_the_limit_are_overtaken(
    limits: Limits, view: LaneView[Row], decision: StepDecision[Row]
) -> None:
    entries = {entry.sequence: entry for entry in decision.admitted}
    wanted = [one.sequence for one in view.candidates if one.sequence in entries]
    assert [entry.sequence for entry in decision.admitted] == wanted
    last = max((i for i, one in enumerate(view.candidates) if one.sequence in entries), default=0)
    overtaken = [one for one in view.candidates[:last] if one.sequence not in entries]
    if overtaken:
        assert limits.max_long_partial_prefills is not None
        for one in overtaken:
            assert one.sequence.num_tokens > limits.long_prefill_token_threshold > 0
    back = [one.group for one in decision.swapped_in]
    assert [g for g in view.swapped if g not in decision.discarded][: len(back)] == back
    if len(back) + len(decision.discarded) < len(view.swapped):
        assert not decision.admitted or limits.policy is Policy.PREFILL_FIRST
    if decision.discarded or (view.swapped and limits.policy is Policy.PREFILL_FIRST):
        assert not decision.admitted


def partial_and_long_prefills_are_bounded(
    limits: Limits, view: LaneView[Row], decision: StepDecision[Row]
) -> None:
    counts = dict(zip(decision.scheduled, decision.num_scheduled_tokens, strict=True))
    old = [one for one in view.running if one.remaining > 1 and one not in victims(decision)]
    left = [
        entry.sequence.num_tokens - entry.num_hits * limits.block_size
        for entry in decision.admitted
    ]
    num_partial = sum(counts.get(one, 0) < one.remaining for one in old)
    new_partial = sum(
        entry.num_scheduled_tokens < remaining
        for entry, remaining in zip(decision.admitted, left, strict=True)
    )
    if limits.max_num_partial_prefills is not None and new_partial:
        assert num_partial + new_partial <= limits.max_num_partial_prefills
    num_long = sum(limits.is_long(one.remaining) for one in old)
    new_long = sum(map(limits.is_long, left))
    if limits.max_long_partial_prefills is not None and new_long:
        assert num_long + new_long <= limits.max_long_partial_prefills


def swaps_go_one_way_and_fit_on_the_host(
    limits: Limits, view: LaneView[Row], decision: StepDecision[Row]
) -> None:
    assert not (decision.swapped_out and decision.swapped_in)
    blocks = [len({b for one in group for b in one.block_ids}) for group in decision.swapped_out]
    assert sum(blocks) <= view.num_free_host_blocks
    for group in decision.swapped_out:
        rest = [one for one in view.running if one.order[:2] == group[0].order[:2]]
        assert set(rest) == set(group)
    if limits.preemption_mode is PreemptionMode.RECOMPUTE:
        assert not decision.swapped_out


def a_lane_that_is_not_empty_makes_progress(
    limits: Limits, view: LaneView[Row], decision: StepDecision[Row]
) -> None:
    has_work = view.running or any(group.pinned_blocks for group in view.forkable)
    if has_work and not view.in_flight:
        assert not decision.is_empty


def groups_are_forked_or_cancelled_not_both(
    limits: Limits, view: LaneView[Row], decision: StepDecision[Row]
) -> None:
    forked = [group for group, _ in decision.forked]
    assert not set(map(id, forked)) & set(map(id, decision.cancelled_forks))
    for group in view.forkable:
        mine = [sibling for one, sibling in decision.forked if one is group]
        assert mine == list(group.siblings)[: len(mine)]


def a_micro_batch_has_an_equal_part_of_the_decodes(
    limits: Limits, view: LaneView[Row], decision: StepDecision[Row]
) -> None:
    assert view.in_flight.isdisjoint(decision.scheduled)
    if view.num_micro_batches == 1:
        return
    decodes = {one for one in view.running if one.remaining == 1}
    most = ceil(len(decodes), view.num_micro_batches)
    free = decodes - view.in_flight
    chosen = decodes & {*decision.scheduled, *victims(decision)} - view.in_flight
    num_plans = view.num_micro_batches - len({one.last_step for one in view.in_flight})
    most_at_once = min(most, ceil(len(free), max(1, num_plans)))
    assert len(decodes.intersection(decision.scheduled)) <= most
    is_for_prompts = len(decision.scheduled) > decision.num_decodes or decision.admitted
    if limits.policy is Policy.CHUNKED or not is_for_prompts:
        assert len(chosen) >= most_at_once


INVARIANTS = (
    the_budget_of_tokens_is_kept,
    prompts_beside_decodes_keep_their_share,
    every_sequence_has_a_row,
    no_block_is_given_twice,
    every_sequence_has_the_blocks_that_the_step_writes,
    preempted_rows_are_last_in_order_and_do_not_run,
    decodes_run_or_are_preempted_unless_the_step_is_for_prompts,
    rounds_are_of_decodes_alone_and_end_with_their_last_tokens,
    chunks_are_parts_of_the_remaining_tokens,
    only_long_prompts_beyond_the_limit_are_overtaken,
    partial_and_long_prefills_are_bounded,
    swaps_go_one_way_and_fit_on_the_host,
    a_lane_that_is_not_empty_makes_progress,
    groups_are_forked_or_cancelled_not_both,
    a_micro_batch_has_an_equal_part_of_the_decodes,
)


def check(case: tuple[Limits, LaneView[Row]]) -> None:
    limits, view = case
    decision = schedule(limits, view)
    for holds in INVARIANTS:
        holds(limits, view, decision)


@settings(derandomize=True, database=None, deadline=None, max_examples=300)
@given(cases())
def test_any_decision_satisfies_the_invariants(case):
    check(case)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(database=None, deadline=None, max_examples=5_000)
@given(cases())
def test_any_of_many_decisions_satisfies_the_invariants(case):
    check(case)
