"""The API call by call, for programs without an event loop (or with one that is not ours)."""

import queue
from collections.abc import Generator, Sequence
from typing import Self, TypeAlias, Unpack

import grpc

from quire.arguments import deadline
from quire.errors import clear_errors
from quire.outputs import Model, RequestDelta, RequestOutput
from quire.prompts import Conversation, Prompt
from quire.requests import (
    RequestOptions,
    cancel_request,
    detokenize_request,
    fill_request,
    request_output,
    tokenize_request,
)
from quire.sampling import SamplingParams
from quire.targets import check_target, client_options
from quire.v1 import inference_pb2, model_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from quire.v1.model_pb2_grpc import ModelServiceStub
from quire.v1.tokenizer_pb2_grpc import TokenizerServiceStub

# The class cannot be subscripted when it runs.
_Call: TypeAlias = "grpc.Future[inference_pb2.GenerateResponse]"


class Client:
    """One channel to a server at `host:port` or `unix:/path`. Safe to share between threads.

    Every call raises QuireError where the server, or the way to it, fails, TypeError or ValueError
    for arguments that cannot be sent, and ValueError once the client is closed. `timeout_s` is the
    call's deadline: the server stops working on it, too; None or infinity sets none.
    """

    def __init__(self, target: str) -> None:
        check_target(target)
        self.target = target
        self._channel = grpc.insecure_channel(target, options=client_options(target))
        self._closed = False

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        return self.generate_all([prompt], [sampling_params], timeout_s=timeout_s, **options)[0]

    def generate_all(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Sequence[SamplingParams | None],
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """All prompts at once, outputs in their order. The first to fail cancels the others."""
        requests = [
            fill_request(inference_pb2.GenerateRequest(), prompt, params, options)
            for prompt, params in zip(prompts, sampling_params, strict=True)
        ]
        timeout = deadline("timeout_s", timeout_s)
        stub = InferenceServiceStub(self._open_channel())
        calls = [stub.Generate.future(request, timeout=timeout) for request in requests]
        try:
            with clear_errors(self.target):
                _raise_first_error(calls)
                return [request_output(r, c.result()) for r, c in zip(requests, calls, strict=True)]
        finally:
            for call in calls:
                call.cancel()

    def stream_generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generator[RequestDelta, None, None]:
        """The output as it is written. Closing the generator cancels the request."""
        request = fill_request(
            inference_pb2.StreamGenerateRequest(), prompt, sampling_params, options
        )
        return self._stream(request, deadline("timeout_s", timeout_s))

    def cancel(self, request_id: str, *, timeout_s: float | None = None) -> None:
        """Ends a request by its id; the call that waits for it fails with CANCELLED."""
        request = cancel_request(request_id)
        timeout = deadline("timeout_s", timeout_s)
        with clear_errors(self.target):
            InferenceServiceStub(self._open_channel()).CancelGenerate(request, timeout=timeout)

    def tokenize(
        self,
        prompt: str | Conversation,
        *,
        add_special_tokens: bool | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """The token ids of a text, or of a conversation as the chat template renders it."""
        request = tokenize_request(prompt, add_special_tokens, model)
        timeout = deadline("timeout_s", timeout_s)
        with clear_errors(self.target):
            stub = TokenizerServiceStub(self._open_channel())
            return list(stub.Tokenize(request, timeout=timeout).token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> str:
        request = detokenize_request(token_ids, skip_special_tokens, model)
        timeout = deadline("timeout_s", timeout_s)
        with clear_errors(self.target):
            stub = TokenizerServiceStub(self._open_channel())
            return stub.Detokenize(request, timeout=timeout).text

    def list_models(self, *, timeout_s: float | None = None) -> list[Model]:
        request = model_pb2.ListModelsRequest()
        timeout = deadline("timeout_s", timeout_s)
        with clear_errors(self.target):
            response = ModelServiceStub(self._open_channel()).ListModels(request, timeout=timeout)
        return [Model.from_proto(model) for model in response.models]

    def close(self) -> None:
        """Ends the channel, and with it every call in progress."""
        self._closed = True
        self._channel.close()

    def _stream(
        self, request: inference_pb2.StreamGenerateRequest, timeout: float | None
    ) -> Generator[RequestDelta, None, None]:
        call = InferenceServiceStub(self._open_channel()).StreamGenerate(request, timeout=timeout)
        try:
            with clear_errors(self.target):
                for message in call:
                    yield RequestDelta.from_proto(message)
        finally:
            call.cancel()

    def _open_channel(self) -> grpc.Channel:
        if self._closed:
            raise ValueError("the client is closed")
        return self._channel

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _raise_first_error(calls: Sequence[_Call]) -> None:
    """Waits for all calls, or for the first that fails, whichever place it has in the sequence."""
    ended: queue.SimpleQueue[_Call] = queue.SimpleQueue()
    for call in calls:
        call.add_done_callback(ended.put)
    for _ in calls:
        ended.get().result()
