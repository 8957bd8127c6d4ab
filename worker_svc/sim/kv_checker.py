"""Checks that every plan keeps the rules of paged attention.

The content of a slot is identified by the hash of the prefix for which it was written. Whole
prefixes are compared only at admission, because between admissions

    a row's slots [0, num_computed_tokens) hold its own prefix, and
    a block in a live table is written only by its holder,

so a step without admissions is checked by what it writes.
"""

from collections.abc import Iterator

import numpy as np

from worker_svc.plan.inputs import Ints, StepInputs
from worker_svc.plan.plans import Admission, BlockMoves, Plan, PlanError
from worker_svc.plan.tables import RowTables
from worker_svc.sim.sampling import Words, mix
from worker_svc.sim.violations import Rule, Violation

_NONE = np.zeros(0, np.int64)


class KvChecker:
    """The contents of every block on device and host, and the holders of device blocks.

    Applies plans to the given tables. A broken rule raises Violation; after that rows are
    undefined until `clear`.
    """

    def __init__(
        self, tables: RowTables, num_blocks: int, num_host_blocks: int, block_size: int
    ) -> None:
        self._tables = tables
        self._block_size = block_size
        # Beside each entry of the token table the hash of its sequence up to and including it: the
        # sum of a term per token. A sampled token adds its term to its predecessor's hash.
        self._prefixes = np.zeros(tables.token_table.shape, np.uint64)
        # The prefix hash for which a slot was written; 0 if it was never written.
        self._slots = np.zeros((num_blocks, block_size), np.uint64)
        self._host_slots = np.zeros((num_host_blocks, block_size), np.uint64)
        self._host_written = np.zeros(num_host_blocks, np.bool_)
        self._holders = np.zeros(num_blocks, np.int64)  # entries of live tables, by block
        self._epoch = 0
        self._step, self._round = 0, 0
        self.violations: list[Violation] = []

    def apply(self, plan: Plan) -> None:
        """Release, admit, append and move blocks."""
        self._check_order(plan)
        self._check_rows(plan)
        self._check_ids(plan)
        released = self._tables.block_table[plan.released_rows]
        self._tables.apply(plan)
        placed = _placed(plan)
        np.subtract.at(self._holders, released[released > 0], 1)
        np.add.at(self._holders, placed, 1)
        for admission in plan.admissions:
            token_ids = admission.token_ids
            terms = _hash_terms(token_ids, np.arange(len(token_ids)))
            self._prefixes[admission.row, : len(token_ids)] = np.cumsum(terms)
        if (self._holders[placed] > 1).any():
            self._check_fresh(plan)
        self._move(plan)

    def write(self, plan: Plan, rows: Ints, inputs: StepInputs) -> None:
        """Write the scheduled tokens into their slots, then check admitted prefixes: a plan's
        sequences may share blocks that the plan itself fills."""
        if (self._holders[inputs.block_numbers] > 1).any():
            self._check_shared(plan, rows[inputs.request_indices], inputs)
        written = self._prefixes.ravel()[inputs.token_indices]
        self._slots.reshape(-1)[inputs.slot_mapping] = written
        for admission in plan.admissions:
            if admission.num_computed_tokens:
                self._check_prefix(plan.step, admission)

    def extend(self, rows: Ints, token_ids: Ints) -> None:
        """To be called before sampled tokens are written into the token table."""
        ends = self._tables.num_tokens[rows]
        terms = _hash_terms(token_ids, ends)
        self._prefixes[rows, ends] = self._prefixes[rows, ends - 1] + terms

    def draft(self, row: int, token_ids: Ints) -> None:
        """To be called before drafts of a row are computed, which are behind its tokens."""
        first = int(self._tables.num_tokens[row])
        positions = first + np.arange(len(token_ids))
        terms = _hash_terms(token_ids, positions)
        self._prefixes[row, positions] = self._prefixes[row, first - 1] + np.cumsum(terms)

    def clear(self) -> None:
        """Forget all rows; blocks keep their contents. The next plan may be another shard's, whose
        epochs are its own."""
        self._holders[:] = 0
        self._epoch = 0

    def record(self, step: int, error: PlanError) -> Violation:
        """Append a violation, or an error of the tables as one, to `violations`."""
        if not isinstance(error, Violation):
            error = Violation(step, Rule.TABLES, str(error))
        self.violations.append(error)
        return error

    def _check_order(self, plan: Plan) -> None:
        rises = (plan.step, plan.round) > (self._step, self._round)
        if plan.epoch < self._epoch or not rises:
            detail = f"epoch {plan.epoch} after epoch {self._epoch} and step {self._step}"
            raise Violation(plan.step, Rule.ORDER, detail)
        self._epoch, self._step, self._round = plan.epoch, plan.step, plan.round

    def _check_rows(self, plan: Plan) -> None:
        if len(plan.released_rows) or plan.admissions:
            self._check_changes(plan)
        known = (plan.rows < self._tables.max_num_seqs).all()
        if known and np.bincount(plan.rows).max(initial=0) > 1:
            raise Violation(plan.step, Rule.SCHEDULE, "twice in a step", row=_repeated(plan.rows))

    def _check_changes(self, plan: Plan) -> None:
        held = set(self._tables.num_tokens.nonzero()[0].tolist())
        for row in plan.released_rows.tolist():
            if row not in held:
                raise Violation(plan.step, Rule.RELEASE, "released, but not held", row=row)
            held.remove(row)
        for row in (admission.row for admission in plan.admissions):
            if row in held or row >= self._tables.max_num_seqs:
                raise Violation(plan.step, Rule.ADMISSION, "admitted, but not free", row=row)
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
                row = _receiver(plan, 0)
                raise Violation(plan.step, Rule.NULL_BLOCK, "in use", row=row, block=0)
            self._check_range(plan, block_ids, len(self._holders))
        for ids in (plan.swap_outs.destinations, plan.swap_ins.sources):
            self._check_range(plan, ids, len(self._host_written))

    @staticmethod
    def _check_range(plan: Plan, block_ids: Ints, num_blocks: int) -> None:
        if len(block_ids) and (block := int(block_ids.max())) >= num_blocks:
            row, detail = _receiver(plan, block), f"there are {num_blocks}"
            raise Violation(plan.step, Rule.BLOCK_RANGE, detail, row=row, block=block)

    def _check_fresh(self, plan: Plan) -> None:
        """A fresh block may be shared only with rows that the plan admits with it as computed."""
        shared = np.bincount(self._computed(plan), minlength=len(self._holders))
        for row, block_ids in self._fresh(plan):
            wrong = self._holders[block_ids] - shared[block_ids] != 1
            if wrong.any():
                block, detail = int(block_ids[wrong][0]), "given, but in a live table"
                raise Violation(plan.step, Rule.FRESH_BLOCK, detail, row=row, block=block)

    def _fresh(self, plan: Plan) -> list[tuple[int, Ints]]:
        """Each row with its new blocks, except those with tokens that count as computed."""
        return [
            *((a.row, a.block_ids[self._num_computed_blocks(a) :]) for a in plan.admissions),
            *_appended(plan),
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
        if not plan.moves_blocks:
            return
        if len(plan.swap_outs.sources) and len(plan.swap_ins.sources):
            raise Violation(plan.step, Rule.SWAP_DIRECTION, "both in one plan")
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
            block, detail = int(moves.sources[unwritten][0]), "swapped in from the host"
            raise Violation(plan.step, Rule.UNWRITTEN_HOST, detail, block=block)
        self._check_targets(plan, moves)
        self._slots[moves.destinations] = self._host_slots[moves.sources]

    def _check_targets(self, plan: Plan, moves: BlockMoves) -> None:
        """Holders of a destination block received it in this plan."""
        if not len(moves.destinations):
            return
        self._check_once(plan.step, moves.destinations)
        placed = np.bincount(_placed(plan), minlength=len(self._holders))
        wrong = (self._holders - placed)[moves.destinations] > 0
        if wrong.any():
            block = int(moves.destinations[wrong][0])
            raise Violation(plan.step, Rule.MOVE_TARGET, "a live row runs on it", block=block)

    @staticmethod
    def _check_once(step: int, destinations: Ints) -> None:
        if len(np.unique(destinations)) != len(destinations):
            block = _repeated(destinations)
            raise Violation(step, Rule.MOVE_TARGET, "a destination twice", block=block)

    def _check_shared(self, plan: Plan, rows: Ints, inputs: StepInputs) -> None:
        """A block with several holders is written only by one for which it is fresh. All other
        holders were admitted in this plan with that part counted as computed. Tokens that are
        computed again change nothing."""
        slots = inputs.slot_mapping
        if len(np.unique(slots)) != len(slots):
            slot = _repeated(slots)
            row = int(rows[slots == slot][-1])
            raise Violation(plan.step, Rule.SLOT, "written twice", row=row, slot=slot)
        is_new = self._slots.ravel()[slots] != self._prefixes.ravel()[inputs.token_indices]
        shared = (self._holders[inputs.block_numbers] > 1) & is_new
        pairs = np.stack([rows[shared], inputs.block_numbers[shared]], axis=1)
        written, first = np.unique(pairs, axis=0, return_index=True)
        for (row, block), slot in zip(written.tolist(), slots[shared][first].tolist(), strict=True):
            readers = np.count_nonzero(self._computed(plan, but=row) == block)
            if self._holders[block] != 1 + readers:
                detail = f"written, with {self._holders[block]} holders"
                raise Violation(
                    plan.step, Rule.SHARED_BLOCK, detail, row=row, block=block, slot=slot
                )

    def _check_prefix(self, step: int, admission: Admission) -> None:
        """The slots of the computed tokens hold this very prefix."""
        row, length = admission.row, admission.num_computed_tokens
        positions = np.arange(length)
        blocks = self._tables.block_table[row, positions // self._block_size].astype(np.int64)
        offsets = positions % self._block_size
        held = self._slots[blocks, offsets]
        wrong = held != self._prefixes[row, :length]
        if not wrong.any():
            return
        first = int(wrong.argmax())
        block = int(blocks[first])
        slot = block * self._block_size + int(offsets[first])
        rule = Rule.FOREIGN if held[first] else Rule.UNWRITTEN
        detail = f"token {first} counts as computed"
        raise Violation(step, rule, detail, row=row, block=block, slot=slot)


def _hash_terms(token_ids: Ints, positions: Ints) -> Words:
    """Each token mixed with its position."""
    keys = (positions.astype(np.uint64) << np.uint64(32)) + token_ids.astype(np.uint64)
    # mix(0) is 0, which marks slots that were never written; hence the 1.
    return mix(keys + np.uint64(1))


def _placed(plan: Plan) -> Ints:
    """Every block that the plan puts into a table, as often as it does."""
    blocks = [admission.block_ids for admission in plan.admissions]
    return np.concatenate([*blocks, plan.appends.block_ids]) if blocks else plan.appends.block_ids


def _appended(plan: Plan) -> Iterator[tuple[int, Ints]]:
    """Each row with the blocks that are appended to its table."""
    ends = plan.appends.num_blocks.cumsum()
    block_ids = np.split(plan.appends.block_ids, ends[:-1])
    # Without any row there is still one part, an empty one.
    return zip(plan.appends.rows.tolist(), block_ids, strict=False)


def _receiver(plan: Plan, block: int) -> int | None:
    """The row into whose table the plan puts the block, if there is one."""
    entries = [*((one.row, one.block_ids) for one in plan.admissions), *_appended(plan)]
    return next((row for row, block_ids in entries if block in block_ids), None)


def _repeated(values: Ints) -> int:
    unique, counts = np.unique(values, return_counts=True)
    return int(unique[counts > 1][0])
