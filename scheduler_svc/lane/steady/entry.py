"""Whether a lane is in a steady state."""

from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.view import Limits
from scheduler_svc.lane.assignments import Assignments
from scheduler_svc.lane.options import LaneOptions
from scheduler_svc.lane.sequence_table import SequenceTable
from scheduler_svc.lane.steady.columns import DecodeColumns
from scheduler_svc.lane.steady.decoding import LaneParts, SteadyDecoding


class SteadyEntry:
    """Begins the steady state of a lane."""

    def __init__(
        self,
        parts: LaneParts,
        table: SequenceTable,
        assignments: Assignments,
        limits: Limits,
        options: LaneOptions,
        depth: int,
    ) -> None:
        """`depth`: the most plans in flight."""
        self._parts = parts
        self._table = table
        self._assignments = assignments
        self._limits = limits
        self._publishes = options.enable_prefix_caching
        self._depth = depth

    def enter(self) -> SteadyDecoding | None:
        """None unless as many plans as may be are in flight, and all of them decode the rows of the
        lane, which has no other sequences. On a worker with stages they never do."""
        parts, table = self._parts, self._table
        if (
            len(parts.in_flight) != self._depth
            or self._assignments.draining
            or not self._assignments.is_empty
            or table.swapped
            or table.forking_groups
            or table.beam_groups
            or table.awaiting_results
            or table.traced.in_prefill
        ):
            return None
        sequences = list(table.rows)
        if not sequences or not parts.in_flight.run_only(sequences):
            return None
        # Plans of several rounds are left to the loop.
        allows_rounds = all(sequence.group.tokens_per_frame > 1 for sequence in sequences)
        if allows_rounds and parts.are_rounds_possible():
            return None
        if not all(map(_is_plain, sequences)):
            return None
        columns = DecodeColumns(sequences, self._limits, self._publishes)
        return SteadyDecoding(columns, parts, allows_rounds)


def _is_plain(sequence: Sequence) -> bool:
    """Whether it gains one token per step, without log-probabilities, and all that are known are
    journaled."""
    params = sequence.group.params
    return not (
        sequence.is_ended
        or sequence.is_beam
        or sequence.is_suspect
        or sequence.num_lookahead_tokens
        or params.num_logprobs
        or params.num_prompt_logprobs
        or sequence.num_journaled != len(sequence.token_ids) - sequence.num_prompt_tokens
    )
