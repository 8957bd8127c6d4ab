"""Speculation of the simulated worker: a given share of its drafts is right."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from worker_svc.plan.inputs import Ints
from worker_svc.plan.plans import Plan
from worker_svc.plan.tables import RowTables
from worker_svc.sim.kv_checker import KvChecker
from worker_svc.sim.sampling import tokens_at

_SALT: Final = np.uint64(0x9E3779B97F4A7C15)
_PARTS: Final = 1 << 20


@dataclass(frozen=True)
class Drafts:
    """The drafts of a step, of each row that runs."""

    rows: Ints
    counts: Ints
    token_ids: Ints  # [num_rows, longest], of which the first `counts` of a row count

    def right_rows(self, depth: int, rows: Ints, token_ids: Ints) -> Ints:
        """Those of the rows, with their last sampled tokens, that have this token as their draft
        number `depth`."""
        places = np.searchsorted(self.rows, rows, sorter=(order := self.rows.argsort()))
        places = order[places]
        has_draft = self.counts[places] > depth
        rows, places, token_ids = rows[has_draft], places[has_draft], token_ids[has_draft]
        return rows[self.token_ids[places, depth] == token_ids] if len(rows) else rows


class SimDrafter:
    """A draft is right or wrong by seed and position alone."""

    def __init__(
        self,
        tables: RowTables,
        kv_checker: KvChecker,
        most: int,
        acceptance_rate: float,
        vocab: int,
    ) -> None:
        """`most` drafts of a row in a step; `vocab` is the size of the vocabulary."""
        self._tables = tables
        self._kv_checker = kv_checker
        self._most = most
        self._num_right = int(acceptance_rate * _PARTS)
        self._vocab_size = vocab

    def draft(self, plan: Plan, rows: Ints, counts: Ints) -> Drafts | None:
        """Write drafts behind the rows' tokens, as far as blocks and batch have room; None if no
        row has any."""
        if not (self._most and plan.num_lookahead_tokens.any()):
            return None
        wanted = np.minimum(self._tables.draft_room(plan, rows, counts), self._most)
        left = self._tables.max_num_batched_tokens - int(counts.sum())
        wanted = np.clip(left - (wanted.cumsum() - wanted), 0, wanted)
        if not wanted.any():
            return None
        token_ids = np.zeros((len(rows), int(wanted.max())), np.int64)
        for place, count in enumerate(wanted.tolist()):
            if count:
                token_ids[place, :count] = self._draft_row(int(rows[place]), count)
        return Drafts(rows, wanted, token_ids)

    def _draft_row(self, row: int, count: int) -> Ints:
        positions = self._tables.num_tokens[row] + np.arange(count)
        seeds = np.repeat(self._tables.seeds[row], count)
        right = tokens_at(seeds, positions, self._vocab_size)
        is_right = tokens_at(seeds ^ _SALT, positions, _PARTS) < self._num_right
        token_ids: Ints = np.where(is_right, right, (right + 1) % self._vocab_size)
        self._tables.token_table[row, positions] = token_ids
        self._kv_checker.draft(row, token_ids)
        return token_ids
