"""Decides what one lane runs in its next step. A pure function: values in, a decision out.

Continuous batching (Orca, OSDI 2022) with chunked prefill (Sarathi-Serve, OSDI 2024), preemption
by recomputation and by swapping (vLLM, SOSP 2023). Two policies:

chunked        decodes, forks, partial prefills, swapped groups, new prompts: all in one step;
               beside decodes fewer tokens of prompts, so that the step stays short
prefill_first  prompts while any are left to compute, else decodes, forks and swapped groups

On a worker with several stages a step has a part of the decodes that are not in flight.

Sequences of each kind are scheduled in order of (priority, arrival, choice), up to the first that
does not fit. A prompt gets all its blocks at its admission, so only decodes need more later.
"""

from typing import Generic

from scheduler_svc.core.block_fit import blocks_for, fit
from scheduler_svc.core.micro_batches import micro_batch, not_in_flight, num_decodes_in_flight
from scheduler_svc.core.preemption import choose_victims
from scheduler_svc.core.view import (
    Admitted,
    BlockFit,
    Candidate,
    Forkable,
    LaneView,
    Limits,
    Policy,
    SeqT,
    StepDecision,
    Swapped,
    SwappedIn,
)


def schedule(limits: Limits, view: LaneView[SeqT]) -> StepDecision[SeqT]:
    """Decide one step."""
    step = _Step(limits, view)
    if step.only_decodes:
        # The common case, the same in both policies.
        if not step.decode_rounds():
            step.decode()
    elif limits.policy is Policy.CHUNKED:
        step.decode()
        step.fork()
        step.prefill()
        step.swap_in()
        step.admit()
    else:
        step.prefill()
        if not view.swapped:
            step.admit()
        if not step.has_work:
            step.decode()
            step.prefill()
            step.fork()
            step.swap_in()
    step.unpin()
    return step.decision


class _Step(Generic[SeqT]):
    """The step being decided, with its remaining budgets."""

    def __init__(self, limits: Limits, view: LaneView[SeqT]) -> None:
        self.decision: StepDecision[SeqT] = StepDecision()
        self._limits = limits
        self._view = view
        self._num_free_blocks = view.num_free_blocks
        self._num_tokens = self._num_prompt_tokens = limits.max_num_batched_tokens
        self._num_rows = len(view.running)
        # Rows reserved for siblings.
        self._num_siblings = view.num_reserved_rows + sum(len(g.siblings) for g in view.forkable)
        self._num_lookahead_slots = 0
        self._reserves_jumps = True  # a jump is not worth a preemption
        self._decodes: list[SeqT] = []
        self._prefills: list[SeqT] = []
        # Prefills without all their blocks: beams that did not run after a fork.
        self._starving: list[SeqT] = []
        for row in not_in_flight(view):
            if (remaining := row.num_tokens - row.num_computed_tokens) == 1:
                self._decodes.append(row)
            elif row.is_beam and row.num_tokens > len(row.block_ids) * limits.block_size:
                self._starving.append(row)
            elif remaining:
                self._prefills.append(row)
        if view.num_micro_batches > 1:
            self._decodes = micro_batch(view, self._decodes)
        # Prompts in flight count: they are continued in later steps.
        left = [row.num_tokens - row.num_computed_tokens for row in view.in_flight]
        self._num_partial = sum(remaining > 1 for remaining in left)
        self._num_long = sum(map(limits.is_long, left))
        # Something did not fit: everything after it waits.
        self._is_blocked = False
        # Rows preempted in this step.
        self._preempted: set[SeqT | None] = set()
        # Hashes of blocks that admissions of this step fill; later admissions may share them.
        self._planned: set[bytes] = set()

    @property
    def only_decodes(self) -> bool:
        """No prompt is left to compute, and no sequence waits for a row."""
        view = self._view
        return not (
            self._prefills or self._starving or view.forkable or view.swapped or view.candidates
        )

    @property
    def has_work(self) -> bool:
        return bool(self.decision.scheduled or self.decision.admitted)

    # Decodes

    def decode_rounds(self) -> bool:
        """Schedule several rounds of each decode. False if one is enough or blocks are missing."""
        most = self._view.num_rounds
        if most == 1:
            return False
        self._num_lookahead_slots = self._limits.num_lookahead_slots
        num_rounds = [min(most, row.max_num_tokens - row.num_tokens) for row in self._decodes]
        if max(num_rounds, default=1) == 1:
            return False
        missing = [
            (row, self._missing_blocks(row, count - 1))
            for row, count in zip(self._decodes, num_rounds, strict=True)
        ]
        appends = [(row, num_blocks) for row, num_blocks in missing if num_blocks > 0]
        if sum(num_blocks for _, num_blocks in appends) > self._num_free_blocks:
            return False
        self._run_decodes(appends)
        self.decision.num_rounds = num_rounds
        return True

    def decode(self) -> None:
        """Schedule every decode, preempting rows if blocks run out."""
        if self._decodes:
            self._num_lookahead_slots = self._limits.num_lookahead_slots
        if self._decodes or num_decodes_in_flight(self._view):
            self._num_prompt_tokens = self._view.max_prompt_tokens
        appends, num_needed = self._appends()
        if num_needed > self._num_free_blocks:
            self._reserves_jumps = False
            appends, num_needed = self._appends()
            if num_needed > self._num_free_blocks:
                appends = self._preempt(dict(appends), num_needed)
                num_needed = sum(missing for _, missing in appends)
        self._num_free_blocks -= num_needed
        self._num_tokens -= len(self._decodes)
        self._run_decodes(appends)
        self._prefills += self._starving
        self._starving = []

    def _appends(self) -> tuple[list[tuple[SeqT, int]], int]:
        """The blocks that decodes miss, and their number."""
        block_size, slots = self._limits.block_size, self._num_lookahead_slots
        rounds = 1 + self._view.num_rounds_in_flight
        appends = [
            (row, missing)
            for row in (*self._decodes, *self._starving)
            if row.num_tokens + slots + rounds * row.num_lookahead_tokens
            > len(row.block_ids) * block_size
            and (missing := self._missing_blocks(row)) > 0
        ]
        return appends, sum(missing for _, missing in appends)

    def _run_decodes(self, appends: list[tuple[SeqT, int]]) -> None:
        self.decision.appends = appends
        self.decision.num_decodes = len(self._decodes)
        self.decision.scheduled += self._decodes
        self.decision.num_scheduled_tokens += [1] * len(self._decodes)

    def _missing_blocks(self, row: SeqT, num_more: int = 0) -> int:
        return self._num_blocks_of(row, num_more, self._view.num_rounds_in_flight) - len(
            row.block_ids
        )

    def _num_blocks_of(self, row: SeqT, num_more: int = 0, num_in_flight: int = 0) -> int:
        """Blocks that a row needs in all, to its last token, if it runs `num_more` rounds more than
        one: with the look-ahead of each of them, and of those in flight."""
        num_slots = row.num_tokens + num_more + self._num_lookahead_slots
        if self._reserves_jumps:
            more = row.num_lookahead_tokens * (num_in_flight + 1 + num_more)
            num_slots = max(num_slots, min(num_slots + more, row.max_num_tokens))
        return blocks_for(min(num_slots, self._limits.max_model_len), self._limits.block_size)

    def _preempt(self, missing: dict[SeqT, int], num_needed: int) -> list[tuple[SeqT, int]]:
        """Preempt rows; return the blocks that the remaining ones miss."""
        victims = choose_victims(self._view, self._limits.preemption_mode, missing, num_needed)
        self.decision.preempted = victims.recomputed
        self.decision.swapped_out = victims.swapped
        self.decision.exhausted = victims.exhausted
        self._num_free_blocks += victims.num_freed_blocks
        self._num_rows -= len(victims.rows)
        self._preempted = set(victims.rows)
        self._decodes = [row for row in self._decodes if row not in self._preempted]
        self._prefills = [row for row in self._prefills if row not in self._preempted]
        self._starving = [row for row in self._starving if row not in self._preempted]
        for group in victims.cancelled_forks:
            self._cancel_forks(group)
        self._is_blocked = True
        return [(row, count) for row, count in missing.items() if row not in self._preempted]

    # Forks

    def fork(self) -> None:
        """Assign rows to siblings of computed prompts: one block and one token each."""
        for group in self._view.forkable:
            if group not in self.decision.cancelled_forks:
                self._fork(group)

    def _fork(self, group: Forkable[SeqT]) -> None:
        if group.source in self._preempted:
            self._cancel_forks(group)
            return
        for sibling in group.siblings:
            if not self._has_room_for_fork():
                self._is_blocked = True
                return
            self.decision.forked.append((group, sibling))
            self._num_free_blocks -= 1
            self._num_tokens -= 1
            self._num_rows += 1
            self._num_siblings -= 1

    def _has_room_for_fork(self) -> bool:
        return (
            not self._is_blocked
            and self._num_free_blocks > 0
            and self._num_tokens > 0
            and self._num_rows < self._limits.max_num_seqs
        )

    def _cancel_forks(self, group: Forkable[SeqT]) -> None:
        self.decision.cancelled_forks.append(group)
        self._num_siblings -= len(group.siblings)

    # Prefills

    def prefill(self) -> None:
        """Continue prompts in progress, those that finish in this step first."""
        for row in sorted(self._prefills, key=self._prefill_order):
            remaining = row.num_tokens - row.num_computed_tokens
            num_tokens = self._chunk(remaining)
            if num_tokens:
                self._num_tokens -= num_tokens
                self._num_prompt_tokens -= num_tokens
                self.decision.scheduled.append(row)
                self.decision.num_scheduled_tokens.append(num_tokens)
            self._num_partial += num_tokens < remaining
            self._num_long += self._limits.is_long(remaining)

    def _prefill_order(self, row: SeqT) -> tuple[bool, tuple[int, int, int]]:
        remaining = row.num_tokens - row.num_computed_tokens
        return self._chunk(remaining) < remaining, row.order

    def _chunk(self, remaining: int) -> int:
        num_tokens = min(remaining, self._num_tokens, self._num_prompt_tokens)
        threshold = self._limits.long_prefill_token_threshold
        if threshold and len(self._prefills) + len(self._view.candidates) > 1:
            return min(num_tokens, threshold)
        return num_tokens

    # Swapped groups

    def swap_in(self) -> None:
        """Swap groups in, unless rows were preempted in this step."""
        for group in self._view.swapped:
            if self._is_blocked or not self._swap_in(group):
                self._is_blocked = True
                return

    def _swap_in(self, group: Swapped[SeqT]) -> bool:
        num_new_blocks = [
            max(0, self._num_blocks_of(row) - len(row.block_ids)) for row in group.sequences
        ]
        num_needed = group.num_blocks + sum(num_new_blocks)
        match fit(num_needed, self._num_free_blocks, self._view.num_usable_blocks, 0):
            case BlockFit.NEVER:
                self.decision.discarded.append(group)
                return True
            case BlockFit.LATER:
                return False
        num_rows = self._num_rows + self._num_siblings + len(group.sequences)
        if num_rows > self._limits.max_num_seqs or self._num_tokens < len(group.sequences):
            return False
        # A partial prompt continues in the next step.
        num_tokens = [int(row.num_tokens - row.num_computed_tokens == 1) for row in group.sequences]
        self._num_free_blocks -= num_needed
        self._num_rows += len(group.sequences)
        self._num_tokens -= sum(num_tokens)
        self.decision.swapped_in.append(SwappedIn(group, num_tokens, num_new_blocks))
        return True

    # New prompts

    def admit(self) -> None:
        """Admit in order until one does not fit; short prompts overtake long ones beyond the limit
        of long prefills."""
        # Siblings of a discarded group return to the queue, ahead of all later arrivals.
        if self._is_blocked or self.decision.discarded:
            return
        for candidate in self._view.candidates:
            num_hits = candidate.num_hits_with(self._planned, self._limits.block_size)
            remaining = candidate.sequence.num_tokens - num_hits * self._limits.block_size
            is_long = self._limits.is_long(remaining)
            if is_long and not self._limits.has_room_for_long(self._num_long):
                continue
            if not self._admit(candidate, num_hits, remaining):
                return

    def _admit(self, candidate: Candidate[SeqT], num_hits: int, remaining: int) -> bool:
        limits = self._limits
        num_rows = self._num_rows + self._num_siblings
        # A group that needs more rows than exist gets them a few at a time.
        if num_rows + min(candidate.num_rows, limits.max_num_seqs) > limits.max_num_seqs:
            return False
        num_new_blocks = self._num_blocks_of(candidate.sequence) - num_hits
        num_needed = num_new_blocks + candidate.num_free_hits
        watermark = limits.watermark if candidate.is_new else 0
        num_usable = self._view.num_usable_blocks
        if fit(num_needed, self._num_free_blocks, num_usable, watermark) is not BlockFit.OK:
            return False
        num_tokens = self._chunk(remaining)
        is_partial = num_tokens < remaining
        if not num_tokens or (is_partial and not limits.has_room_for_partial(self._num_partial)):
            return False
        self._num_partial += is_partial
        self._num_long += limits.is_long(remaining)
        self._num_free_blocks -= num_needed
        self._num_tokens -= num_tokens
        self._num_prompt_tokens -= num_tokens
        self._num_rows += 1
        self._num_siblings += candidate.num_rows - 1
        num_filled = (num_hits * limits.block_size + num_tokens) // limits.block_size
        self._planned.update(candidate.block_hashes[num_hits:num_filled])
        self.decision.admitted.append(
            Admitted(candidate.sequence, num_hits, num_tokens, num_new_blocks)
        )
        return True

    # Pinned blocks

    def unpin(self) -> None:
        """Unpin the last group's blocks if nothing runs: what waits for them would starve."""
        if self.decision.is_empty and not self._view.in_flight:
            pinned = [group for group in self._view.forkable if group.pinned_blocks is not None]
            self.decision.cancelled_forks += pinned[-1:]
