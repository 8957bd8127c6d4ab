"""The state of rows between plans: tokens, blocks, sampling parameters."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from worker_svc.plan.failures import RowFailure
from worker_svc.plan.inputs import InputBuffers, Ints, StepInputs, prepare_inputs
from worker_svc.plan.logprobs import MAX_NUM_LOGPROBS
from worker_svc.plan.plans import Admission, BlockAppends, Plan, PlanError
from worker_svc.plan.prompt_logprobs import PromptTargets, prompt_targets

# In the token table: a sampled token that is only on the device.
PLACEHOLDER_TOKEN: Final = -1


class RowTables:
    """One line per row. A free row has no tokens and a table of null blocks.

    Row invariant: num_computed_tokens <= num_tokens <= max_model_len
        tokens  [0, computed) in the cache  [computed, num_tokens) known, not yet computed
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._block_size = block_size
        self._max_num_batched_tokens = max_num_batched_tokens
        self._num_pool_blocks = num_blocks
        width = -(-max_model_len // block_size)
        self.token_table = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.block_table = np.zeros((max_num_seqs, width), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.temperatures = np.zeros(max_num_seqs, np.float32)
        self.top_ks = np.zeros(max_num_seqs, np.int64)
        self.top_ps = np.ones(max_num_seqs, np.float32)
        self.min_ps = np.zeros(max_num_seqs, np.float32)
        self.seeds = np.zeros(max_num_seqs, np.uint64)
        self.num_logprobs = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_logprobs = np.zeros(max_num_seqs, np.int64)
        self.processed_logprobs = np.zeros(max_num_seqs, bool)
        self.without_drafts = np.zeros(max_num_seqs, bool)
        self.failures: dict[int, RowFailure] = {}  # by failed row
        self._buffers = InputBuffers(max_num_seqs, max_num_batched_tokens)

    @property
    def max_num_seqs(self) -> int:
        return len(self.num_tokens)

    @property
    def max_num_batched_tokens(self) -> int:
        return self._max_num_batched_tokens

    @property
    def max_model_len(self) -> int:
        return self.token_table.shape[1]

    def apply(self, plan: Plan) -> None:
        """Release, admit, append, in this order. PlanError leaves the tables half changed."""
        for row in plan.released_rows.tolist():
            self._release(row)
        for admission in plan.admissions:
            self._admit(admission)
        if len(plan.appends.rows):
            self._append(plan.appends)

    def clear(self) -> None:
        """Release every row."""
        for row in self.num_tokens.nonzero()[0].tolist():
            self._release(row)

    def without_failed(self, plan: Plan) -> tuple[Ints, Ints, dict[int, RowFailure]]:
        """The scheduled rows that have not failed, their token counts, and the failed ones."""
        if not self.failures:
            return plan.rows, plan.num_scheduled_tokens, {}
        failures = {row: self.failures[row] for row in plan.rows.tolist() if row in self.failures}
        running = ~np.isin(plan.rows, list(failures))
        return plan.rows[running], plan.num_scheduled_tokens[running], failures

    def runnable(self, plan: Plan) -> tuple[Ints, Ints, dict[int, RowFailure]]:
        """As `without_failed`, with the tokens that rows with look-ahead compute now: after jumps
        that the scheduler did not know, as many as their blocks and the batch have room for. Rows
        that have no room at all are left out."""
        rows, counts, failures = self.without_failed(plan)
        if not plan.num_lookahead_tokens.any():
            return rows, counts, failures
        lookahead = plan.num_lookahead_tokens
        if failures:
            lookahead = lookahead[~np.isin(plan.rows, list(failures))]
        num_tokens, num_computed = self.num_tokens[rows], self.num_computed_tokens[rows]
        room = self.num_blocks[rows] * self._block_size - num_computed
        room[num_tokens >= self.max_model_len] = 0
        known = num_tokens - num_computed
        if (known == counts).all() and (room >= counts).all():
            # The common case: no row has jumped.
            return rows, counts, failures
        wanted = np.minimum(known, counts + lookahead)
        possible = np.where(lookahead > 0, np.minimum(wanted, room), counts)
        # The budget has room for what is scheduled; jumps share the rest, in order.
        most = self._max_num_batched_tokens - int(np.minimum(possible, counts).sum())
        more = np.maximum(possible - counts, 0)
        more = np.clip(most - (more.cumsum() - more), 0, more)
        possible = np.minimum(possible, counts) + more
        return rows[possible > 0], possible[possible > 0], failures

    def draft_room(self, plan: Plan, rows: Ints, counts: Ints) -> Ints:
        """How many drafts each of the rows may have, which compute `counts` tokens: those with
        look-ahead and one token left to compute, unless they are admitted without drafts, as many
        as their blocks have room for. A token may follow the last draft."""
        lookahead = np.zeros(self.max_num_seqs, np.int64)
        lookahead[plan.rows] = plan.num_lookahead_tokens
        num_tokens = self.num_tokens[rows]
        slots = np.minimum(self.num_blocks[rows] * self._block_size, self.max_model_len - 1)
        room = np.minimum(slots - num_tokens, lookahead[rows])
        is_decoding = (counts == 1) & (num_tokens - self.num_computed_tokens[rows] == 1)
        return np.where(is_decoding & ~self.without_drafts[rows], np.maximum(room, 0), 0)

    def drafts(self, rows: Ints, most: int) -> NDArray[np.int32]:
        """What the table has behind the rows' tokens, `[len(rows), most]`."""
        places = self.num_tokens[rows, None] + np.arange(most)
        found: NDArray[np.int32] = self.token_table[
            rows[:, None], np.minimum(places, self.max_model_len - 1)
        ]
        return found

    def accept_draft(self, rows: Ints) -> None:
        """Count one more token of each row as computed: a draft that was sampled, too."""
        self.num_computed_tokens[rows] += 1

    def prepare(
        self, rows: Ints, num_scheduled_tokens: Ints, num_drafts: Ints | None = None
    ) -> StepInputs:
        """The inputs of the scheduled rows, valid until the next call. `num_drafts` of a row's
        scheduled tokens are drafts, which the table has behind its tokens. PlanError for an
        invalid schedule."""
        self._check_schedule(rows, num_scheduled_tokens, num_drafts)
        return prepare_inputs(
            rows,
            num_scheduled_tokens,
            self.num_computed_tokens[rows],
            self._with_drafts(rows, num_drafts),
            self.token_table,
            self.block_table,
            self._block_size,
            self._buffers,
        )

    def prompt_targets(self, rows: Ints, inputs: StepInputs) -> PromptTargets | None:
        """The prompt tokens whose log-probabilities the scheduled rows compute, if any."""
        return prompt_targets(
            rows,
            self.num_prompt_logprobs[rows],
            self.num_prompt_tokens[rows],
            inputs.query_start_loc,
            inputs.seq_lens,
            self.token_table,
        )

    def block_tables(self, rows: Ints, seq_lens: Ints) -> NDArray[np.int32]:
        """The rows' block tables, as wide as the longest sequence needs."""
        width = -(-int(seq_lens.max(initial=0)) // self._block_size)
        return self.block_table[rows, :width]

    def advance(self, rows: Ints, seq_lens: Ints) -> None:
        """Count the rows' tokens up to `seq_lens` as computed."""
        self.num_computed_tokens[rows] = seq_lens

    def hold_back(self, rows: Ints, counts: Ints | int = 1) -> None:
        """Count the last tokens of rows as not computed: drafts, until they are accepted, and the
        last token of rows that cannot sample yet, which is computed again when they run next."""
        self.num_computed_tokens[rows] -= counts

    def write_sampled(self, rows: Ints, token_ids: Ints) -> None:
        """Append one token to each row's sequence."""
        self.token_table[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def append_placeholder(self, rows: Ints) -> None:
        """Append PLACEHOLDER_TOKEN to each row's sequence."""
        self.token_table[rows, self.num_tokens[rows]] = PLACEHOLDER_TOKEN
        self.num_tokens[rows] += 1

    def append_token(self, row: int, token_id: int) -> None:
        """`write_sampled` for one row. PlanError if it holds no sequence or is full."""
        self._require_held(row)
        if self.num_tokens[row] >= self.max_model_len:
            raise PlanError(f"row {row}: no room for a token")
        self.write_sampled(np.array([row]), np.array([token_id]))

    def set_num_computed(self, row: int, num_computed: int) -> None:
        """PlanError if the row holds no sequence, or one with fewer tokens."""
        self._require_held(row)
        if num_computed > self.num_tokens[row]:
            raise PlanError(f"row {row}: {num_computed} of {self.num_tokens[row]} tokens computed")
        self.num_computed_tokens[row] = num_computed

    def fail(self, row: int, failure: RowFailure) -> None:
        """Mark a row as failed until it is released."""
        self.failures[row] = failure

    def _release(self, row: int) -> None:
        self._require_held(row)
        self.num_tokens[row] = 0
        self.num_computed_tokens[row] = 0
        self.num_blocks[row] = 0
        self.block_table[row] = 0
        self.failures.pop(row, None)

    def _admit(self, admission: Admission) -> None:
        row, length = admission.row, len(admission.token_ids)
        self._require_free(row)
        if not 0 < length < self.max_model_len:
            raise PlanError(f"row {row}: {length} tokens, at most {self.max_model_len - 1} fit")
        if admission.num_computed_tokens >= length:
            raise PlanError(f"row {row}: no token left to compute")
        if (count := max(admission.num_logprobs, admission.num_prompt_logprobs)) > MAX_NUM_LOGPROBS:
            raise PlanError(f"row {row}: {count} log-probabilities, at most {MAX_NUM_LOGPROBS}")
        if admission.num_prompt_tokens > length:
            raise PlanError(f"row {row}: {admission.num_prompt_tokens} of {length} tokens a prompt")
        self.token_table[row, :length] = admission.token_ids
        self.num_tokens[row] = length
        self.num_computed_tokens[row] = admission.num_computed_tokens
        self.temperatures[row] = admission.temperature
        self.top_ks[row] = admission.top_k
        self.top_ps[row] = admission.top_p
        self.min_ps[row] = admission.min_p
        self.seeds[row] = admission.seed
        self.num_logprobs[row] = admission.num_logprobs
        self.num_prompt_tokens[row] = admission.num_prompt_tokens
        self.num_prompt_logprobs[row] = admission.num_prompt_logprobs
        params = admission.logits_params
        self.processed_logprobs[row] = params is not None and params.processed_logprobs
        self.without_drafts[row] = admission.without_drafts
        self._append(BlockAppends.of_row(row, admission.block_ids))

    def _append(self, appends: BlockAppends) -> None:
        rows, counts, ids = appends.rows, appends.num_blocks, appends.block_ids
        if rows.max() >= self.max_num_seqs or not self.num_tokens[rows].all():
            for row in rows.tolist():
                self._require_held(row)
        if len(rows) > 1 and np.bincount(rows).max() > 1:
            raise PlanError("a row gets blocks twice")
        starts = self.num_blocks[rows]
        ends = starts + counts
        if (ends > self.block_table.shape[1]).any():
            row = int(rows[ends.argmax()])
            raise PlanError(f"row {row}: {ends.max()} blocks, its table has fewer")
        wrong = (ids < 1) | (ids >= self._num_pool_blocks)
        if wrong.any():
            row = int(np.repeat(rows, counts)[wrong][0])
            raise PlanError(f"row {row}: block ids must be 1 to {self._num_pool_blocks - 1}")
        # The place of a row's first block, less that of its first id.
        shifts = starts - (counts.cumsum() - counts)
        places = np.repeat(shifts, counts) + np.arange(len(ids))
        self.block_table[np.repeat(rows, counts), places] = ids
        self.num_blocks[rows] = ends

    def _with_drafts(self, rows: Ints, num_drafts: Ints | None) -> Ints:
        """The number of each row's tokens, drafts included."""
        num_tokens: Ints = self.num_tokens[rows]
        return num_tokens if num_drafts is None else num_tokens + num_drafts

    def _check_schedule(
        self, rows: Ints, num_scheduled_tokens: Ints, num_drafts: Ints | None
    ) -> None:
        # The reason is sought afterwards: this runs in every step, and each array operation counts.
        if not self._is_valid(rows, num_scheduled_tokens, num_drafts):
            self._refuse_schedule(rows, num_scheduled_tokens, num_drafts)

    def _is_valid(self, rows: Ints, num_scheduled_tokens: Ints, num_drafts: Ints | None) -> bool:
        """Whether `_refuse_schedule` has no reason."""
        if rows.max(initial=0) >= self.max_num_seqs:
            return False
        num_tokens = self._with_drafts(rows, num_drafts)
        seq_lens = self.num_computed_tokens[rows] + num_scheduled_tokens
        # A free row has no tokens, so that nothing fits.
        fitting = seq_lens <= np.minimum(num_tokens, self.num_blocks[rows] * self._block_size)
        fitting &= (num_scheduled_tokens > 0) & (num_tokens < self.max_model_len)
        return bool(
            fitting.all()
            and num_scheduled_tokens.sum() <= self._max_num_batched_tokens
            and (len(rows) < 2 or np.bincount(rows).max() == 1)
        )

    def _refuse_schedule(
        self, rows: Ints, num_scheduled_tokens: Ints, num_drafts: Ints | None
    ) -> None:
        """PlanError with what is wrong."""
        self._refuse("no such row", rows, rows >= self.max_num_seqs)
        self._refuse("no sequence held", rows, self.num_tokens[rows] == 0)
        if np.bincount(rows).max(initial=0) > 1:
            raise PlanError("a row is scheduled twice")
        if (total := int(num_scheduled_tokens.sum())) > self._max_num_batched_tokens:
            limit = self._max_num_batched_tokens
            raise PlanError(f"{total} tokens scheduled, at most {limit} in one step")
        num_tokens = self._with_drafts(rows, num_drafts)
        seq_lens = self.num_computed_tokens[rows] + num_scheduled_tokens
        self._refuse("no token scheduled", rows, num_scheduled_tokens < 1)
        self._refuse("more tokens scheduled than known", rows, seq_lens > num_tokens)
        missing = seq_lens > self.num_blocks[rows] * self._block_size
        self._refuse("tokens without a block", rows, missing)
        self._refuse("no room for a token", rows, num_tokens >= self.max_model_len)

    @staticmethod
    def _refuse(what: str, rows: Ints, wrong: NDArray[np.bool_]) -> None:
        if wrong.any():
            raise PlanError(f"{what}: rows {rows[wrong].tolist()}")

    def _require_held(self, row: int) -> None:
        if row >= self.max_num_seqs or self.num_tokens[row] == 0:
            raise PlanError(f"row {row} holds no sequence")

    def _require_free(self, row: int) -> None:
        if row >= self.max_num_seqs or self.num_tokens[row] != 0:
            raise PlanError(f"row {row} is not free")
