"""The context of a trace, as W3C Trace Context has it in the headers of a call. Pure."""

import re
import secrets
from dataclasses import dataclass, replace
from typing import Final, Self

# The names of the headers, and of gRPC's metadata.
TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
# Of later versions more may follow, after another dash.
_TRACEPARENT: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})"
    r"-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?"
)
_SAMPLED: Final = 0x01
# A longer one is dropped: it may be propagated in part, but then only at its members.
_MAX_TRACESTATE: Final = 512
_PRINTABLE: Final = re.compile(r"[\x20-\x7e]*")
_LOW_BITS: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span within a trace, as its children name it."""

    trace_id: int  # 128 bits, never 0
    span_id: int  # 64 bits, never 0
    # Its spans are recorded.
    is_sampled: bool
    # Entries of tracing systems, which are passed on unchanged.
    tracestate: str = ""

    @classmethod
    def parse(cls, traceparent: str, tracestate: str = "") -> Self | None:
        """The context of a call; None for a header that is not valid, as if there were none."""
        match = _TRACEPARENT.fullmatch(traceparent.strip())
        if match is None or match["version"] == "ff":
            return None
        if match["version"] == "00" and match["rest"] is not None:
            return None
        trace_id, span_id = int(match["trace"], 16), int(match["span"], 16)
        if not (trace_id and span_id):
            return None
        is_valid = len(tracestate) <= _MAX_TRACESTATE and _PRINTABLE.fullmatch(tracestate)
        is_sampled = bool(int(match["flags"], 16) & _SAMPLED)
        return cls(trace_id, span_id, is_sampled, tracestate.strip() if is_valid else "")

    @classmethod
    def begin(cls, sampling_ratio: float) -> Self:
        """The first span of a new trace, which is sampled with this probability. Whether it is
        follows from the id, in the way of OpenTelemetry's TraceIdRatioBased."""
        trace_id = _random_id(128)
        is_sampled = trace_id & _LOW_BITS < round(sampling_ratio * 2**64)
        return cls(trace_id, _random_id(64), is_sampled)

    def child(self) -> Self:
        """A new span of the same trace."""
        return replace(self, span_id=_random_id(64))

    @property
    def traceparent(self) -> str:
        flags = _SAMPLED if self.is_sampled else 0
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{flags:02x}"

    @property
    def trace_id_hex(self) -> str:
        """The trace's id as in logs."""
        return f"{self.trace_id:032x}"

    def pack(self) -> str:
        """The context as one string, for `unpack`."""
        return f"{self.traceparent} {self.tracestate}".rstrip()

    @classmethod
    def unpack(cls, packed: str) -> Self | None:
        """None for an empty string, or one that `pack` has not made."""
        traceparent, _, tracestate = packed.partition(" ")
        return cls.parse(traceparent, tracestate)


def _random_id(num_bits: int) -> int:
    """A random number that is not 0."""
    return secrets.randbits(num_bits) or 1
