"""Reports the phases of a lane's sequences to the traces of their requests.

Called where the state of a sequence changes, never for a token. Without a trace a call is one
comparison.
"""

from quire.service.tracing.spans import AttributeValue
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.tracing.request_trace import Phase, RequestTrace


class TracedSequences:
    """The traced sequences of one lane."""

    def __init__(self, worker: str) -> None:
        """`worker` is its address, for the spans of what it computes."""
        self._worker = worker
        # Those that compute their tokens, with the number of output tokens that they had before.
        # Empty if nothing is traced: the lane's loop looks no further.
        self.in_prefill: dict[Sequence, int] = {}

    def admit(self, sequence: Sequence, num_cached_tokens: int) -> None:
        """A sequence has a row, and computes what is not cached."""
        if (trace := _trace_of(sequence)) is None:
            return
        self.in_prefill[sequence] = sequence.num_output_tokens
        attributes: dict[str, AttributeValue] = {
            "quire.worker": self._worker,
            "quire.cached_tokens": num_cached_tokens,
            "quire.uncached_tokens": sequence.num_tokens - num_cached_tokens,
        }
        trace.enter(sequence.choice, Phase.PREFILL, sequence.num_output_tokens, attributes)

    def swap_in(self, sequence: Sequence) -> None:
        """A swapped sequence has a row again, and continues."""
        if (trace := _trace_of(sequence)) is not None:
            if sequence.num_output_tokens:
                self._decode(trace, sequence)
            else:
                self.admit(sequence, sequence.num_computed_tokens)

    def swap_out(self, sequence: Sequence) -> None:
        """A sequence has lost its row and its blocks to others; the host has a copy."""
        self._leave(sequence, Phase.SWAPPED)

    def preempt(self, sequence: Sequence) -> None:
        """A sequence has lost its row and its blocks to others, or its host blocks."""
        self._leave(sequence, Phase.PREEMPTED)

    def complete_prefills(self) -> None:
        """Note which sequences have sampled a token. To be called after each result, while
        `in_prefill` is not empty."""
        for sequence, num_known in list(self.in_prefill.items()):
            if sequence.is_ended or sequence.num_output_tokens > num_known:
                del self.in_prefill[sequence]
                if (trace := _trace_of(sequence)) is not None:
                    self._decode(trace, sequence)

    def _decode(self, trace: RequestTrace, sequence: Sequence) -> None:
        attributes = {"quire.worker": self._worker}
        trace.enter(sequence.choice, Phase.DECODE, sequence.num_output_tokens, attributes)

    def _leave(self, sequence: Sequence, phase: Phase) -> None:
        if (trace := _trace_of(sequence)) is not None:
            self.in_prefill.pop(sequence, None)
            attributes = {"quire.worker": self._worker}
            trace.enter(sequence.choice, phase, sequence.num_output_tokens, attributes)


def _trace_of(sequence: Sequence) -> RequestTrace | None:
    """Of a search, the first beam stands for all: its output is the log."""
    trace = sequence.group.trace
    return None if trace is None or (sequence.is_beam and not sequence.is_first) else trace
