"""Fields that nothing serves yet are refused by their names."""

import grpc
import pytest
from gateway_stack import Stack, field_of, info_of
from google.protobuf.message import Message as ProtoMessage

from gateway_svc.generation import unserved_fields
from quire.v1 import inference_pb2 as pb


def with_field(message: ProtoMessage, name: str) -> ProtoMessage:
    """Set a field to a value that differs from its default."""
    field = message.DESCRIPTOR.fields_by_name[name]
    value = getattr(message, name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        value[1] = 1.0
    elif field.is_repeated and field.message_type is not None:
        value.add()
    elif field.is_repeated:
        value.append("a")
    elif field.message_type is not None:
        value.SetInParent()
    else:
        setattr(message, name, "a" if isinstance(value, str) else True if value is False else 2)
    return message


@pytest.mark.parametrize("name", sorted(unserved_fields.SAMPLING_PARAMS))
async def test_a_sampling_parameter_is_refused(stack: Stack, name: str) -> None:
    params = with_field(pb.SamplingParams(), name)
    await check_refused(stack, pb.GenerateRequest(text="a", sampling_params=params), name)


async def check_refused(stack: Stack, request: pb.GenerateRequest, name: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.inference.Generate(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert info_of(caught.value).reason == "UNSUPPORTED_FIELD"
    assert field_of(caught.value).endswith(f".{name}")
