import grpc
import pytest
from google.rpc import error_details_pb2

from quire.service.errors import MAX_TEXT_BYTES, RequestError, invalid

LONG = {"ascii": "a" * 10**6, "wide": "日" * 10**6, "emoji": "a" + "🙂" * 10**6}


@pytest.mark.parametrize("kind", LONG)
def test_long_text_is_truncated_at_a_character(kind: str) -> None:
    error = invalid("prompt", "TOO_LONG", LONG[kind])
    [violation] = unpacked(error, error_details_pb2.BadRequest()).field_violations
    assert (violation.field, violation.reason) == ("prompt", "TOO_LONG")
    for text in (error.message.removeprefix("prompt: "), violation.description):
        assert LONG[kind].startswith(text.removesuffix("..."))
        assert MAX_TEXT_BYTES - 16 < len(text.encode()) <= MAX_TEXT_BYTES


def test_short_text_stays_as_it_is() -> None:
    assert invalid("role", "R", "日" * 300).message == "role: " + "日" * 300


def test_a_lone_surrogate_is_replaced() -> None:
    assert invalid("role", "R", "is \ud800").message == "role: is ?"


def test_details_that_are_too_large_are_omitted() -> None:
    detail = error_details_pb2.ErrorInfo(reason="R", metadata={"key": "a" * 10**5})
    assert RequestError(grpc.StatusCode.INTERNAL, "no", (detail,)).packed_details() == []


def unpacked(
    error: RequestError, detail: error_details_pb2.BadRequest
) -> error_details_pb2.BadRequest:
    assert any(packed.Unpack(detail) for packed in error.packed_details())
    return detail
