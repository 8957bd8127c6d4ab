"""Why rows fail."""

from dataclasses import dataclass
from typing import Final

from quire.internal.v1 import worker_pb2


@dataclass(frozen=True)
class InvalidField:
    """The field of a request that cannot be served."""

    name: str  # as errors of the public API name it
    reason: str  # in UPPER_SNAKE_CASE, of the error


@dataclass(frozen=True)
class RowFailure:
    """Why a row has no token."""

    # A sentence, whose subject is the field if there is one.
    message: str
    # None: not the request is at fault, but the worker or its model.
    invalid_field: InvalidField | None = None

    def to_proto(self, row: int) -> worker_pb2.RowFailure:
        message = worker_pb2.RowFailure(row=row, reason=self.message)
        if self.invalid_field is not None:
            message.invalid_field.name = self.invalid_field.name
            message.invalid_field.reason = self.invalid_field.reason
        return message


NO_TOKEN: Final = RowFailure("the model gave logits that are not finite numbers")
