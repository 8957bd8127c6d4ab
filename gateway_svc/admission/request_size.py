"""The limits of one serialized request, which follow from the model. Checked before parsing.

Parsed, a message of two bytes takes about seventy, and parsing blocks the process: it holds the
interpreter's lock, so that a thread would not help.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from gateway_svc.admission.wire_format import FieldCounter, largest_field
from quire.service.errors import RequestError, failed, invalid

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

# Everything but the prompt's text and token ids: 4096 messages with their roles are one MiB. The
# rest is a margin, so that a text that is somewhat too long reaches the check that names its field.
_MARGIN_BYTES = 4 * 2**20
# Of the largest message that is read, to the largest request: what is between them is refused with
# the name of a field.
_MESSAGE_FACTOR = 2
_MAX_UTF8_BYTES = 4
_MAX_VARINT_BYTES = 5
# Fields and submessages together: 4096 messages of a conversation have three each.
_MAX_FIELDS = 16_384
# Of the numbers of one packed field, unless the model's sequences are longer.
_MAX_NUMBERS = 2**17 + 1
# Smaller requests contain at most half as many fields.
_UNCOUNTED_BYTES = _MAX_FIELDS


@dataclass(frozen=True)
class RequestSize:
    """What a request may contain at most."""

    max_bytes: int
    max_numbers: int

    @classmethod
    def of_context(
        cls, max_model_len: int, longest_token: int, message_bytes: int
    ) -> "RequestSize":
        """The largest request that a model's context can need, at most `message_bytes`."""
        per_token = max(_MAX_UTF8_BYTES * longest_token, _MAX_VARINT_BYTES)
        return cls(
            min(message_bytes, max_model_len * per_token + _MARGIN_BYTES),
            max(_MAX_NUMBERS, max_model_len + 1),
        )

    def max_message_bytes(self, message_bytes: int) -> int:
        """The size of a message above which the server refuses it by its length."""
        return min(message_bytes, _MESSAGE_FACTOR * self.max_bytes)

    def check(self, data: bytes, descriptor: "Descriptor") -> None:
        """Check a serialized request of a message type. RequestError names the field."""
        if len(data) <= _UNCOUNTED_BYTES:
            return
        if len(data) > self.max_bytes:
            raise _invalid(
                largest_field(data, descriptor, _MAX_FIELDS),
                "REQUEST_TOO_LARGE",
                f"makes a request of {len(data)} bytes; the model's context needs at most "
                f"{self.max_bytes}",
            )
        exceeded = FieldCounter(_MAX_FIELDS, self.max_numbers).count(data, descriptor)
        if exceeded is not None:
            raise _invalid(exceeded.path, exceeded.reason, exceeded.description)


def _invalid(path: str, reason: str, description: str) -> RequestError:
    """The error that names a field, or none if the path is empty."""
    if path:
        return invalid(path, reason, description)
    return failed(grpc.StatusCode.INVALID_ARGUMENT, reason, f"request: {description}")
