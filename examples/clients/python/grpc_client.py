"""Quire over gRPC, with the generated stubs and without the client library.

Usage: grpc_client.py {stream,chat,cancel,resume,errors} TARGET...
"""

import sys
import time
import uuid
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from quire.v1.conversation_pb2 import Conversation, Message
from quire.v1.inference_pb2 import (
    CancelGenerateRequest,
    GenerateRequest,
    ResumeGenerateRequest,
    SamplingParams,
    StreamGenerateRequest,
)
from quire.v1.inference_pb2_grpc import InferenceServiceStub

# Responses with log-probabilities may be larger than gRPC's default limit, 4 MiB.
CHANNEL_OPTIONS = [("grpc.max_receive_message_length", 32 * 2**20)]


def stream(gateway: Any) -> None:
    params = SamplingParams(max_tokens=32, seed=1)
    request = StreamGenerateRequest(text="Return the number of", sampling_params=params)
    for message in gateway.StreamGenerate(request, timeout=60):
        for delta in message.deltas:
            print(delta.text, end="", flush=True)
    print()


def chat(gateway: Any) -> None:
    messages = [Message(role="user", content="What does this function return?")]
    request = GenerateRequest(
        conversation=Conversation(messages=messages),
        sampling_params=SamplingParams(max_tokens=32, seed=1),
    )
    print(gateway.Generate(request, timeout=60).choices[0].text)


def cancel(gateway: Any) -> None:
    """Cancel by the id, which works from anywhere. Cancelling the call ends the request, too."""
    request = StreamGenerateRequest(
        request_id=str(uuid.uuid4()),
        text="Return a list of",
        sampling_params=SamplingParams(max_tokens=400, ignore_eos=True),
    )
    call = gateway.StreamGenerate(request, timeout=60)
    next(call)
    gateway.CancelGenerate(CancelGenerateRequest(request_id=request.request_id), timeout=10)
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        print(error.code().name)


def resume(gateways: Sequence[Any]) -> None:
    """Continue after the tokens received so far, at the next gateway, until the end."""
    request = StreamGenerateRequest(
        request_id=str(uuid.uuid4()),
        text="Open the file",
        sampling_params=SamplingParams(max_tokens=200, seed=1, ignore_eos=True),
        resume_window_s=30,
    )
    next_token = num_failures = 0
    has_end = False
    gateway = cycle(gateways)
    call = next(gateway).StreamGenerate(request, timeout=60)
    while True:
        try:
            for message in call:
                for delta in message.deltas:
                    if not has_end:
                        print(delta.text, end="", flush=True)
                    if delta.token_ids:
                        next_token = delta.first_token_index + len(delta.token_ids)
                    has_end = has_end or delta.finish_reason != 0
            print()
            return
        except grpc.RpcError as error:
            if is_lost(error) and not next_token:
                call = next(gateway).StreamGenerate(request, timeout=60)
            elif is_resumable(error):
                again = ResumeGenerateRequest(
                    request_id=request.request_id, next_token_indices=[next_token]
                )
                call = next(gateway).ResumeGenerate(again, timeout=60)
            else:
                raise
        time.sleep(min(0.05 * 2**num_failures, 2))
        num_failures += 1


def is_resumable(error: grpc.RpcError) -> bool:
    info = detail(error, error_details_pb2.ErrorInfo())
    if info is None:
        return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    return error.code() is grpc.StatusCode.UNAVAILABLE or info.metadata["resumable"] == "true"


def is_lost(error: grpc.RpcError) -> bool:
    """Whether the connection broke before the request was recorded."""
    info = detail(error, error_details_pb2.ErrorInfo())
    return info is not None and info.reason == "UNKNOWN_REQUEST"


def errors(gateway: Any) -> None:
    params = SamplingParams(top_p=2)
    try:
        gateway.Generate(GenerateRequest(text="a", sampling_params=params), timeout=60)
    except grpc.RpcError as error:
        print(f"{error.code().name}: {error.details()}")
        if request := detail(error, error_details_pb2.BadRequest()):
            print("BadRequest:", request.field_violations[0].field)
        if info := detail(error, error_details_pb2.ErrorInfo()):
            print("ErrorInfo:", info.reason)
        if retry := detail(error, error_details_pb2.RetryInfo()):
            print(f"RetryInfo: {retry.retry_delay.ToMilliseconds()} ms")


def detail(error: Any, kind: Any) -> Any:
    """Return the error's detail of this type; None if it has none."""
    status = rpc_status.from_call(error)
    return (
        next((kind for packed in status.details if packed.Unpack(kind)), None) if status else None
    )


def main() -> None:
    step, *targets = sys.argv[1:]
    channels = [grpc.insecure_channel(target, CHANNEL_OPTIONS) for target in targets]
    gateways = [InferenceServiceStub(channel) for channel in channels]
    if step == "resume":
        resume(gateways)
    else:
        {"stream": stream, "chat": chat, "cancel": cancel, "errors": errors}[step](gateways[0])


if __name__ == "__main__":
    main()
