"""Checks that every plan keeps the rules of paged attention.

What a slot holds is known by the hash of the prefix it was written for. Whole prefixes are looked
at only where a sequence comes with some, because between admissions

    a row's slots [0, num_computed_tokens) hold its own prefix, and
    a block in a live table is written by its only holder,

so that a step without admissions is checked by what it writes.
"""

import numpy as np

from worker_svc.inputs import Ints, StepInputs
from worker_svc.plans import Admission, BlockAppend, BlockMoves, Plan, PlanError
from worker_svc.sim.prefixes import PrefixHashes
from worker_svc.sim.violations import Place, Rule, Violation
from worker_svc.tables import Tables

_NONE = np.zeros(0, np.int64)


class Ledger:
    """The contents of every block on device and host, and who holds the device's.

    Applies plans to the tables it is given, for the runner. What breaks a rule raises Violation
    and stands in `violations`; rows are undefined from there to `clear`.
    """

    def __init__(
        self, tables: Tables, num_blocks: int, num_host_blocks: int, block_size: int
    ) -> None:
        self._tables = tables
        self._block_size = block_size
        self._prefixes = PrefixHashes(tables)
        # Of each slot the hash of the prefix it was written for; 0 if nobody wrote it.
        self._slots = np.zeros((num_blocks, block_size), np.uint64)
        self._host_slots = np.zeros((num_host_blocks, block_size), np.uint64)
        self._host_written = np.zeros(num_host_blocks, np.bool_)
        self._holders = np.zeros(num_blocks, np.int64)  # entries of live tables, by block
        self._epoch = 0
        self._step, self._round = 0, 0
        self.violations: list[Violation] = []

    def apply(self, plan: Plan) -> None:
        """Releases, admits, appends and moves blocks."""
        self._check_order(plan)
        self._check_rows(plan)
        self._check_ids(plan)
        released = self._tables.block_table[plan.released_rows]
        self._tables.apply(plan)
        placed = _placed(plan)
        np.subtract.at(self._holders, released[released > 0], 1)
        np.add.at(self._holders, placed, 1)
        for admission in plan.admissions:
            self._prefixes.admit(admission.row, admission.token_ids)
        if (self._holders[placed] > 1).any():
            self._check_fresh(plan)
        self._move(plan)

    def write(self, plan: Plan, rows: Ints, inputs: StepInputs) -> None:
        """The scheduled tokens go into their slots; only then may admitted prefixes be read,
        because a plan's sequences share blocks that the plan itself fills."""
        if (self._holders[inputs.block_numbers] > 1).any():
            self._check_shared(plan, rows[inputs.request_indices], inputs)
        written = self._prefixes.table.ravel()[inputs.token_indices]
        self._slots.reshape(-1)[inputs.slot_mapping] = written
        for admission in plan.admissions:
            if admission.num_computed_tokens:
                self._check_prefix(plan.step, admission)

    def extend(self, rows: Ints, token_ids: Ints) -> None:
        """To be called before sampled tokens are written into the token table."""
        self._prefixes.extend(rows, token_ids)

    def clear(self) -> None:
        """All rows are gone; blocks keep their contents."""
        self._holders[:] = 0

    def noted(self, step: int, error: PlanError) -> Violation:
        """Enters a violation, or what the tables refused, into the list."""
        if not isinstance(error, Violation):
            error = Violation(step, Rule.TABLES, Place(), str(error))
        self.violations.append(error)
        return error

    def _check_order(self, plan: Plan) -> None:
        rises = (plan.step, plan.round) > (self._step, self._round)
        if plan.epoch < self._epoch or not rises:
            detail = f"epoch {plan.epoch} after epoch {self._epoch} and step {self._step}"
            raise Violation(plan.step, Rule.ORDER, Place(), detail)
        self._epoch, self._step, self._round = plan.epoch, plan.step, plan.round

    def _check_rows(self, plan: Plan) -> None:
        if len(plan.released_rows) or plan.admissions:
            self._check_changes(plan)
        known = (plan.rows < self._tables.max_num_seqs).all()
        if known and np.bincount(plan.rows).max(initial=0) > 1:
            raise Violation(
                plan.step, Rule.SCHEDULE, Place(_repeated(plan.rows)), "twice in a step"
            )

    def _check_changes(self, plan: Plan) -> None:
        held = set(self._tables.num_tokens.nonzero()[0].tolist())
        for row in plan.released_rows.tolist():
            if row not in held:
                raise Violation(plan.step, Rule.RELEASE, Place(row), "released, but not held")
            held.remove(row)
        for row in (admission.row for admission in plan.admissions):
            if row in held or row >= self._tables.max_num_seqs:
                raise Violation(plan.step, Rule.ADMISSION, Place(row), "admitted, but not free")
            held.add(row)

    def _check_ids(self, plan: Plan) -> None:
        device = (
            _placed(plan),
            plan.swap_outs.sources,
            plan.swap_ins.destinations,
            plan.copies.sources,
            plan.copies.destinations,
        )
        for block_ids in device:
            if len(block_ids) and not block_ids.min():
                place = Place(_receiver(plan, 0), block=0)
                raise Violation(plan.step, Rule.NULL_BLOCK, place, "in use")
            self._check_range(plan, block_ids, len(self._holders))
        for ids in (plan.swap_outs.destinations, plan.swap_ins.sources):
            self._check_range(plan, ids, len(self._host_written))

    @staticmethod
    def _check_range(plan: Plan, block_ids: Ints, num_blocks: int) -> None:
        if len(block_ids) and (block := int(block_ids.max())) >= num_blocks:
            place = Place(_receiver(plan, block), block=block)
            raise Violation(plan.step, Rule.BLOCK_RANGE, place, f"there are {num_blocks}")

    def _check_fresh(self, plan: Plan) -> None:
        """Whoever else has a fresh block was admitted beside it and counts it as computed."""
        shared = np.bincount(self._computed(plan), minlength=len(self._holders))
        for row, block_ids in self._fresh(plan):
            wrong = self._holders[block_ids] - shared[block_ids] != 1
            if wrong.any():
                place = Place(row, block=int(block_ids[wrong][0]))
                raise Violation(plan.step, Rule.FRESH_BLOCK, place, "given, but in a live table")

    def _fresh(self, plan: Plan) -> list[tuple[int, Ints]]:
        """By row, the new blocks that hold nothing the row counts as computed."""
        return [
            *((a.row, a.block_ids[self._num_computed_blocks(a) :]) for a in plan.admissions),
            *((a.row, a.block_ids) for a in plan.appends),
        ]

    def _computed(self, plan: Plan, but: int | None = None) -> Ints:
        """The blocks with computed tokens of the admitted rows, except of row `but`."""
        blocks = [
            a.block_ids[: self._num_computed_blocks(a)] for a in plan.admissions if a.row != but
        ]
        return np.concatenate(blocks) if blocks else _NONE

    def _num_computed_blocks(self, admission: Admission) -> int:
        return -(-admission.num_computed_tokens // self._block_size)

    def _move(self, plan: Plan) -> None:
        if len(plan.swap_outs.sources) and len(plan.swap_ins.sources):
            raise Violation(plan.step, Rule.SWAP_DIRECTION, Place(), "both in one plan")
        self._swap_out(plan)
        self._swap_in(plan)
        self._check_targets(plan, plan.copies)
        self._slots[plan.copies.destinations] = self._slots[plan.copies.sources]

    def _swap_out(self, plan: Plan) -> None:
        moves = plan.swap_outs
        self._check_once(plan.step, moves.destinations)
        self._host_slots[moves.destinations] = self._slots[moves.sources]
        self._host_written[moves.destinations] = True

    def _swap_in(self, plan: Plan) -> None:
        moves = plan.swap_ins
        unwritten = ~self._host_written[moves.sources]
        if unwritten.any():
            place = Place(block=int(moves.sources[unwritten][0]))
            raise Violation(plan.step, Rule.UNWRITTEN_HOST, place, "swapped in from the host")
        self._check_targets(plan, moves)
        self._slots[moves.destinations] = self._host_slots[moves.sources]

    def _check_targets(self, plan: Plan, moves: BlockMoves) -> None:
        """Whoever holds a destination got it in this plan."""
        if not len(moves.destinations):
            return
        self._check_once(plan.step, moves.destinations)
        placed = np.bincount(_placed(plan), minlength=len(self._holders))
        wrong = (self._holders - placed)[moves.destinations] > 0
        if wrong.any():
            place = Place(block=int(moves.destinations[wrong][0]))
            raise Violation(plan.step, Rule.MOVE_TARGET, place, "a live row runs on it")

    @staticmethod
    def _check_once(step: int, destinations: Ints) -> None:
        if len(np.unique(destinations)) != len(destinations):
            place = Place(block=_repeated(destinations))
            raise Violation(step, Rule.MOVE_TARGET, place, "a destination twice")

    def _check_shared(self, plan: Plan, rows: Ints, inputs: StepInputs) -> None:
        """A block with several holders is written only by one for whom it is fresh, while the
        others were admitted in this plan with what it writes counted as computed."""
        slots = inputs.slot_mapping
        if len(np.unique(slots)) != len(slots):
            slot = _repeated(slots)
            place = Place(int(rows[slots == slot][-1]), slot)
            raise Violation(plan.step, Rule.SLOT, place, "written twice")
        shared = self._holders[inputs.block_numbers] > 1
        pairs = np.stack([rows[shared], inputs.block_numbers[shared]], axis=1)
        written, first = np.unique(pairs, axis=0, return_index=True)
        for (row, block), slot in zip(written.tolist(), slots[shared][first].tolist(), strict=True):
            others = np.count_nonzero(self._computed(plan, but=row) == block)
            if self._holders[block] != 1 + others:
                detail = f"written, with {self._holders[block]} holders"
                raise Violation(plan.step, Rule.SHARED_BLOCK, Place(row, slot, block), detail)

    def _check_prefix(self, step: int, admission: Admission) -> None:
        """The slots of the computed tokens hold this very prefix."""
        row, length = admission.row, admission.num_computed_tokens
        positions = np.arange(length)
        blocks = self._tables.block_table[row, positions // self._block_size].astype(np.int64)
        offsets = positions % self._block_size
        held = self._slots[blocks, offsets]
        wrong = held != self._prefixes.table[row, :length]
        if not wrong.any():
            return
        first = int(wrong.argmax())
        slot = int(blocks[first] * self._block_size + offsets[first])
        rule = Rule.FOREIGN if held[first] else Rule.UNWRITTEN
        place = Place(row, slot, int(blocks[first]))
        raise Violation(step, rule, place, f"token {first} counts as computed")


def _placed(plan: Plan) -> Ints:
    """Every block that the plan puts into a table, as often as it does."""
    blocks = [admission.block_ids for admission in plan.admissions]
    blocks += [append.block_ids for append in plan.appends]
    return np.concatenate(blocks) if blocks else _NONE


def _receiver(plan: Plan, block: int) -> int | None:
    """The row into whose table the plan puts the block, if there is one."""
    entries: list[Admission | BlockAppend] = [*plan.admissions, *plan.appends]
    return next((entry.row for entry in entries if block in entry.block_ids), None)


def _repeated(values: Ints) -> int:
    unique, counts = np.unique(values, return_counts=True)
    return int(unique[counts > 1][0])
