"""Samples at the rows' last tokens, and at their drafts as long as these are what was sampled."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from worker_svc.plan.failures import RowFailure
from worker_svc.plan.inputs import Ints
from worker_svc.plan.logprobs import Logprobs
from worker_svc.plan.tables import RowTables
from worker_svc.runner.row_sampler import RowSampler, SampledTokens
from worker_svc.speculation.draft_lines import DraftLines


@dataclass(frozen=True)
class VerifiedTokens:
    """The tokens of a step."""

    # Those at last tokens, then those at first drafts, and so on. None if no row has sampled.
    parts: list[SampledTokens]
    num_accepted: Ints = field(default_factory=lambda: np.empty(0, np.int64))  # drafts of each row

    @property
    def sampled_rows(self) -> list[int]:
        """A row is listed once per token."""
        return [*chain.from_iterable(part.rows.tolist() for part in self.parts)]

    @property
    def sampled_token_ids(self) -> list[int]:
        return [*chain.from_iterable(part.token_ids.tolist() for part in self.parts)]

    @property
    def num_gained(self) -> Counter[int]:
        """Tokens behind drafts, by row."""
        return Counter(chain.from_iterable(part.rows.tolist() for part in self.parts[1:]))

    @property
    def logprobs(self) -> Logprobs | None:
        counts = [len(part.rows) for part in self.parts]
        parts = [part.logprobs for part in self.parts]
        return parts[0] if len(parts) == 1 else Logprobs.join(counts, parts)


def sample_and_verify(
    sampler: RowSampler,
    tables: RowTables,
    logits: Tensor,
    lines: DraftLines,
    rows: Ints,
    failures: dict[int, RowFailure],
) -> VerifiedTokens:
    """Sample a token of each row, and one more for each of its accepted drafts. Rows that fail are
    added to `failures`; one that fails behind a draft keeps its tokens, and is reported by the next
    step."""
    draft_ids = tables.drafts(rows, lines.longest)
    num_accepted = np.zeros_like(rows)
    parts: list[SampledTokens] = []
    alive = np.arange(len(rows))  # indices of the rows whose drafts were right so far
    for depth in range(lines.longest + 1):
        part = sampler.sample(_lines_of(logits, lines.lines[depth, alive]), rows[alive], failures)
        parts.append(part)
        for row, failure in part.failures.items():
            tables.fail(row, failure)
            if depth == 0:
                failures.setdefault(row, failure)
        alive = alive[part.is_valid]
        has_draft = lines.num_drafts[alive] > depth
        alive, token_ids = alive[has_draft], part.token_ids[has_draft]
        if len(alive):
            alive = alive[token_ids == draft_ids[alive, depth]]
        if not len(alive):
            break
        num_accepted[alive] += 1
        tables.accept_draft(rows[alive])
    return VerifiedTokens(parts, num_accepted)


def _lines_of(logits: Tensor, lines: Ints) -> Tensor:
    """Adjacent lines are not copied."""
    first, end = int(lines[0]), int(lines[-1]) + 1
    return logits[first:end] if end - first == len(lines) else logits[torch.from_numpy(lines)]
