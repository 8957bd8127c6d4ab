"""How a gRPC call has ended."""

from collections.abc import Mapping
from typing import Final
from urllib.parse import unquote

from grpc import StatusCode

from quire.service.http2 import frames
from quire.service.http2.headers import decode_binary

# By the number as text.
_CODES: Final = {str(code.value[0]).encode(): code for code in StatusCode}


class CallEnded(Exception):
    """The call has ended, for whatever reason: its status."""

    def __init__(self, code: StatusCode, details: str, packed_status: bytes) -> None:
        """`packed_status`: a google.rpc.Status, empty if the peer has sent none."""
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details
        self.packed_status = packed_status


def status_of(trailers: Mapping[bytes, bytes]) -> tuple[StatusCode, str, bytes]:
    """The code, the details, and the packed status or nothing."""
    code = _CODES.get(trailers.get(b"grpc-status", b""), StatusCode.UNKNOWN)
    details = unquote(trailers.get(b"grpc-message", b"").decode(errors="replace"))
    try:
        packed_status = decode_binary(trailers.get(b"grpc-status-details-bin", b""))
    except ValueError:
        packed_status = b""
    return code, details, packed_status


def code_of_reset(code: int) -> StatusCode:
    """By the mapping of gRPC's protocol, as far as it distinguishes."""
    return StatusCode.CANCELLED if code == frames.CANCEL else StatusCode.UNAVAILABLE
