"""Jumps: tokens that follow a sampled one without being sampled, because nothing else is possible.

A row jumps only in plans that give it look-ahead. Its tokens are computed by the next passes, as
many at a time as its blocks have room for.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from worker_svc.plan.inputs import Ints
from worker_svc.plan.logprobs import Logprobs
from worker_svc.plan.plans import Plan, StepOutput
from worker_svc.plan.tables import RowTables

# Returns the forced tokens of a row after its last one, at most so many.
ForcedTokens = Callable[[int, int], Iterable[int]]
_NOTHING_GAINED: Final[Mapping[int, int]] = {}


@dataclass(frozen=True)
class Jumps:
    """Appended tokens in order, one entry each."""

    rows: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def add_to(self, output: StepOutput, plan: Plan, tables: RowTables) -> StepOutput:
        """The output with these tokens, and with the computed tokens of rows with look-ahead."""
        if not plan.num_lookahead_tokens.any():
            return output
        first = len(output.sampled_rows)
        num_sampled = first + len(self.rows)
        rows = [row for row in lookahead_rows(plan) if row not in output.failures]
        logprobs = output.logprobs
        return replace(
            output,
            sampled_rows=output.sampled_rows + self.rows,
            sampled_token_ids=output.sampled_token_ids + self.token_ids,
            # A row with log-probabilities does not jump.
            logprobs=Logprobs.join([first, len(self.rows)], [logprobs, None]),
            forced_indices=list(range(first, num_sampled)),
            lookahead_rows=rows,
            num_computed_tokens=tables.num_computed_tokens[rows].tolist(),
        )


def lookahead_rows(plan: Plan) -> dict[int, int]:
    """The look-ahead of each scheduled row that has any."""
    pairs = zip(plan.rows.tolist(), plan.num_lookahead_tokens.tolist(), strict=False)
    return {row: count for row, count in pairs if count}


def jump(
    plan: Plan,
    tables: RowTables,
    rows: Ints,
    forced_tokens: ForcedTokens,
    num_gained: Mapping[int, int] = _NOTHING_GAINED,
) -> Jumps:
    """Append the forced tokens of `rows`, which have just sampled, but for rows with
    log-probabilities: forced tokens have none. `num_gained` is the part of their look-ahead that
    rows have used by accepted drafts."""
    jumps = Jumps()
    if not (len(rows) and plan.num_lookahead_tokens.any()):
        return jumps
    lookahead = lookahead_rows(plan)
    for row in rows.tolist():
        room = tables.max_model_len - int(tables.num_tokens[row])
        left = lookahead.get(row, 0) - num_gained.get(row, 0)
        most = 0 if tables.num_logprobs[row] else min(left, room)
        for token_id in forced_tokens(row, most) if most > 0 else ():
            tables.write_sampled(np.array([row]), np.array([token_id]))
            jumps.rows.append(row)
            jumps.token_ids.append(token_id)
    return jumps
