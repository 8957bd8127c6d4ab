"""Messages that are far too large for the model are refused by gRPC's core, without a copy."""

import grpc
import pytest
from gateway_stack import Stack, info_of

from gateway_svc.admission.request_size import RequestSize
from quire import AsyncClient
from quire.client.errors import ResourceExhaustedError
from quire.service.channels import PUBLIC_MESSAGE_BYTES
from quire.v1 import tokenizer_pb2


def test_the_largest_message_follows_from_the_model() -> None:
    size = RequestSize.of_context(1024, 16, PUBLIC_MESSAGE_BYTES)
    assert size.max_message_bytes(PUBLIC_MESSAGE_BYTES) == 2 * size.max_bytes < 10 * 2**20
    long = RequestSize.of_context(2**20, 128, PUBLIC_MESSAGE_BYTES)
    assert long.max_message_bytes(PUBLIC_MESSAGE_BYTES) == PUBLIC_MESSAGE_BYTES


async def test_messages_between_both_limits_are_refused_with_the_field(stack: Stack) -> None:
    size = stack.gateway.request_size()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.tokenizer.Tokenize(
            tokenizer_pb2.TokenizeRequest(text=" " * (2 * size.max_bytes - 100))
        )
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert info_of(caught.value).reason == "REQUEST_TOO_LARGE"


async def test_larger_messages_do_not_reach_the_gateway(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the scheduler's limit, which is not known when the server starts.
    limits = stack.gateway.served.get(None).limits(None)
    size = RequestSize.of_context(limits.max_model_len, limits.longest_token, PUBLIC_MESSAGE_BYTES)
    largest = 2 * size.max_bytes
    attempts = stack.gateway.live_limits.num_attempts
    async with AsyncClient(stack.address) as client:
        with pytest.raises(ResourceExhaustedError) as caught:
            await client.tokenize(" " * largest)
    assert stack.gateway.live_limits.num_attempts == attempts
    assert f"; a message may have at most {largest}: " in caught.value.message
    assert not caught.value.resumable
    await stack.check_next_request()
