"""What one lane runs in its next step. A pure function: values in, a decision out.

Continuous batching (Orca, OSDI 2022) with chunked prefill (Sarathi-Serve, OSDI 2024), preemption
by recomputation and by swapping (vLLM, SOSP 2023). Two policies:

chunked        decodes, forks, partial prefills, swapped groups, new prompts: all in one step
prefill_first  prompts while there are any to compute, else decodes, forks and swapped groups

Order is (priority, arrival, choice) among those of one kind, and nobody passes the first that does
not fit. Blocks for a whole prompt are reserved at its admission, so only decodes ever need more.
"""

from typing import Generic

from scheduler_svc.core.preemption import take_back
from scheduler_svc.core.view import (
    Admitted,
    Candidate,
    Decision,
    Fit,
    Forkable,
    Limits,
    Policy,
    R,
    Swapped,
    SwappedIn,
    View,
)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def fit(num_needed: int, num_free: int, num_usable: int, watermark: int) -> Fit:
    """`num_usable` blocks are all that could ever be free; `watermark` ones stay so."""
    if num_needed > num_usable - watermark:
        return Fit.NEVER
    return Fit.OK if num_needed <= num_free - watermark else Fit.LATER


def fit_of_prompt(num_tokens: int, limits: Limits, num_usable: int) -> Fit:
    """OK or NEVER: whether a pool could hold a prompt if it held nothing else, hit or not."""
    num_slots = min(num_tokens + limits.num_lookahead_slots, limits.max_model_len)
    num_needed = blocks_for(num_slots, limits.block_size)
    return fit(num_needed, num_usable, num_usable, limits.watermark)


def schedule(limits: Limits, view: View[R]) -> Decision[R]:
    """Decides one step."""
    step = _Step(limits, view)
    if step.only_decodes:
        # As both policies have it; most steps are so.
        if not step.decode_often():
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
            step.fork()
            step.swap_in()
    step.unblock()
    return step.decision


class _Step(Generic[R]):
    """The budgets of the step being decided, thrown away with it."""

    def __init__(self, limits: Limits, view: View[R]) -> None:
        self.decision: Decision[R] = Decision()
        self._limits = limits
        self._view = view
        self._num_free_blocks = view.num_free_blocks
        self._num_tokens = limits.max_num_batched_tokens
        self._num_rows = len(view.running)
        # Rows promised to siblings.
        self._num_siblings = view.num_reserved_rows
        self._num_siblings += sum(len(group.siblings) for group in view.forkable)
        self._num_lookahead_slots = 0
        self._decodes: list[R] = []
        self._prefills: list[R] = []
        for row in view.running:
            if row.num_tokens - row.num_computed_tokens == 1:
                self._decodes.append(row)
            else:
                self._prefills.append(row)
        self._num_partial = 0
        self._num_long = 0
        # Somebody did not fit: those behind wait.
        self._is_blocked = False
        # Rows that gave way in this step.
        self._gone: set[R | None] = set()
        # Hashes of the blocks that admissions of this step fill; later ones may share them.
        self._planned: set[bytes] = set()

    @property
    def only_decodes(self) -> bool:
        """Nobody has a prompt to compute, or wants a row."""
        view = self._view
        return not (self._prefills or view.forkable or view.swapped or view.candidates)

    @property
    def has_work(self) -> bool:
        return bool(self.decision.scheduled or self.decision.admitted)

    # Decodes

    def decode_often(self) -> bool:
        """Schedules every decode as often as the view has it, up to its last token. False: there is
        no room for that, or no use."""
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
        """Schedules every decode; those for whose blocks there is no room are preempted."""
        block_size = self._limits.block_size
        if self._decodes:
            self._num_lookahead_slots = self._limits.num_lookahead_slots
        num_slots = self._num_lookahead_slots
        appends = [
            (row, missing)
            for row in self._decodes
            if row.num_tokens + num_slots > len(row.block_ids) * block_size
            and (missing := self._missing_blocks(row)) > 0
        ]
        num_needed = sum(missing for _, missing in appends)
        if num_needed > self._num_free_blocks:
            appends = self._preempt(dict(appends), num_needed)
            num_needed = sum(missing for _, missing in appends)
        self._num_free_blocks -= num_needed
        self._num_tokens -= len(self._decodes)
        self._run_decodes(appends)

    def _run_decodes(self, appends: list[tuple[R, int]]) -> None:
        self.decision.appends = appends
        self.decision.num_decodes = len(self._decodes)
        self.decision.scheduled += self._decodes
        self.decision.num_scheduled_tokens += [1] * len(self._decodes)

    def _missing_blocks(self, row: R, num_more_tokens: int = 0) -> int:
        return self._num_blocks_of(row, num_more_tokens) - len(row.block_ids)

    def _num_blocks_of(self, row: R, num_more_tokens: int = 0) -> int:
        """What it needs in all, look-ahead included."""
        num_slots = row.num_tokens + num_more_tokens + self._num_lookahead_slots
        num_slots = min(num_slots, self._limits.max_model_len)
        return blocks_for(num_slots, self._limits.block_size)

    def _preempt(self, missing: dict[R, int], num_needed: int) -> list[tuple[R, int]]:
        """Has rows give way; what those who stay are missing."""
        taken = take_back(self._view, self._limits.preemption_mode, missing, num_needed)
        self.decision.preempted = taken.recomputed
        self.decision.swapped_out = taken.swapped
        self._num_free_blocks += taken.num_freed_blocks
        self._num_rows -= len(taken.rows)
        self._gone = set(taken.rows)
        self._decodes = [row for row in self._decodes if row not in self._gone]
        self._prefills = [row for row in self._prefills if row not in self._gone]
        for group in taken.unforked:
            self._unfork(group)
        self._is_blocked = True
        return [(row, count) for row, count in missing.items() if row not in self._gone]

    # Forks

    def fork(self) -> None:
        """Gives rows to siblings of computed prompts: one block and one token each."""
        for group in self._view.forkable:
            if group not in self.decision.unforked:
                self._fork(group)

    def _fork(self, group: Forkable[R]) -> None:
        if group.source in self._gone:
            self._unfork(group)
            return
        for sibling in group.siblings:
            if not self._fits_a_fork():
                self._is_blocked = True
                return
            self.decision.forked.append((group, sibling))
            self._num_free_blocks -= 1
            self._num_tokens -= 1
            self._num_rows += 1
            self._num_siblings -= 1

    def _fits_a_fork(self) -> bool:
        return (
            not self._is_blocked
            and self._num_free_blocks > 0
            and self._num_tokens > 0
            and self._num_rows < self._limits.max_num_seqs
        )

    def _unfork(self, group: Forkable[R]) -> None:
        self.decision.unforked.append(group)
        self._num_siblings -= len(group.siblings)

    # Prefills

    def prefill(self) -> None:
        """Goes on with prompts under way, those that finish in this step first."""
        for row in sorted(self._prefills, key=self._prefill_order):
            remaining = row.num_tokens - row.num_computed_tokens
            num_tokens = self._chunk(remaining)
            if num_tokens:
                self._num_tokens -= num_tokens
                self.decision.scheduled.append(row)
                self.decision.num_scheduled_tokens.append(num_tokens)
            self._num_partial += num_tokens < remaining
            self._num_long += self._limits.is_long(remaining)

    def _prefill_order(self, row: R) -> tuple[bool, tuple[int, int, int]]:
        remaining = row.num_tokens - row.num_computed_tokens
        return self._chunk(remaining) < remaining, row.order

    def _chunk(self, remaining: int) -> int:
        num_tokens = min(remaining, self._num_tokens)
        threshold = self._limits.long_prefill_token_threshold
        if threshold and len(self._prefills) + len(self._view.candidates) > 1:
            return min(num_tokens, threshold)
        return num_tokens

    # Swapped groups

    def swap_in(self) -> None:
        """Brings swapped groups back, unless blocks were taken from somebody in this step."""
        for group in self._view.swapped:
            if self._is_blocked or not self._swap_in(group):
                self._is_blocked = True
                return

    def _swap_in(self, group: Swapped[R]) -> bool:
        num_new_blocks = [max(0, self._missing_blocks(row)) for row in group.sequences]
        num_needed = group.num_blocks + sum(num_new_blocks)
        match fit(num_needed, self._num_free_blocks, self._view.num_usable_blocks, 0):
            case Fit.NEVER:
                self.decision.given_up.append(group)
                return True
            case Fit.LATER:
                return False
        num_rows = self._num_rows + self._num_siblings + len(group.sequences)
        if num_rows > self._limits.max_num_seqs or self._num_tokens < len(group.sequences):
            return False
        # A prompt that was swapped half-way goes on in the next step.
        num_tokens = [int(row.num_tokens - row.num_computed_tokens == 1) for row in group.sequences]
        self._num_free_blocks -= num_needed
        self._num_rows += len(group.sequences)
        self._num_tokens -= sum(num_tokens)
        self.decision.swapped_in.append(SwappedIn(group, num_tokens, num_new_blocks))
        return True

    # New prompts

    def admit(self) -> None:
        """Admits in order until one does not fit; who is short passes the long where those
        are too many."""
        # Siblings of a group that is given up go back to the queue, before all that came later.
        if self._is_blocked or self.decision.given_up:
            return
        for candidate in self._view.candidates:
            num_hits = self._hits(candidate)
            remaining = candidate.sequence.num_tokens - num_hits * self._limits.block_size
            is_long = self._limits.is_long(remaining)
            if is_long and not self._limits.has_room_for_long(self._num_long):
                continue
            if not self._admit(candidate, num_hits, remaining):
                return

    def _admit(self, candidate: Candidate[R], num_hits: int, remaining: int) -> bool:
        limits = self._limits
        num_rows = self._num_rows + self._num_siblings
        # A group that wants more rows than there are gets them in turns.
        if num_rows + min(candidate.num_rows, limits.max_num_seqs) > limits.max_num_seqs:
            return False
        num_new_blocks = self._num_blocks_of(candidate.sequence) - num_hits
        num_needed = num_new_blocks + candidate.num_free_hits
        watermark = limits.watermark if candidate.is_new else 0
        num_usable = self._view.num_usable_blocks
        if fit(num_needed, self._num_free_blocks, num_usable, watermark) is not Fit.OK:
            return False
        num_tokens = self._chunk(remaining)
        is_partial = num_tokens < remaining
        if not num_tokens or (is_partial and not self._has_room_for_partial()):
            return False
        self._num_partial += is_partial
        self._num_long += limits.is_long(remaining)
        self._num_free_blocks -= num_needed
        self._num_tokens -= num_tokens
        self._num_rows += 1
        self._num_siblings += candidate.num_rows - 1
        num_filled = (num_hits * limits.block_size + num_tokens) // limits.block_size
        self._planned.update(candidate.block_hashes[num_hits:num_filled])
        self.decision.admitted.append(
            Admitted(candidate.sequence, num_hits, num_tokens, num_new_blocks)
        )
        return True

    def _has_room_for_partial(self) -> bool:
        most = self._limits.max_num_partial_prefills
        return most is None or self._num_partial < most

    def _hits(self, candidate: Candidate[R]) -> int:
        """Cached blocks, and those behind them that an earlier admission fills in this step."""
        # The last token is always computed: its logits are wanted.
        matchable = (candidate.sequence.num_tokens - 1) // self._limits.block_size
        most = min(matchable, len(candidate.block_hashes))
        num_hits = min(candidate.num_hits, most)
        while num_hits < most and candidate.block_hashes[num_hits] in self._planned:
            num_hits += 1
        return num_hits

    # Holds

    def unblock(self) -> None:
        """Gives up the last hold if nothing runs: what waits behind it could wait for ever."""
        if self.decision.is_empty:
            holds = [group for group in self._view.forkable if group.hold is not None]
            self.decision.unforked += holds[-1:]
