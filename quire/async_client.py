"""The API call by call, for programs that run in an event loop."""

from collections.abc import AsyncGenerator, Sequence
from typing import Self, Unpack

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


class AsyncClient:
    """One channel to a server at `host:port` or `unix:/path`, for the event loop of its first call.

    Every call raises QuireError where the server, or the way to it, fails, TypeError or ValueError
    for arguments that cannot be sent, and ValueError once the client is closed. Cancelling the task
    cancels the call. `timeout_s` is the call's deadline: the server stops working on it, too; None
    or infinity sets none.
    """

    def __init__(self, target: str) -> None:
        check_target(target)
        self.target = target
        self._channel: grpc.aio.Channel | None = None
        self._closed = False

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        request = fill_request(inference_pb2.GenerateRequest(), prompt, sampling_params, options)
        timeout = deadline("timeout_s", timeout_s)
        stub = InferenceServiceStub(self._open_channel())
        with clear_errors(self.target):
            return request_output(request, await stub.Generate(request, timeout=timeout))

    def stream_generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestDelta, None]:
        """The output as it is written. Closing the generator cancels the request."""
        request = fill_request(
            inference_pb2.StreamGenerateRequest(), prompt, sampling_params, options
        )
        return self._stream(request, deadline("timeout_s", timeout_s))

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> None:
        """Ends a request by its id; the call that waits for it fails with CANCELLED."""
        request = cancel_request(request_id)
        timeout = deadline("timeout_s", timeout_s)
        with clear_errors(self.target):
            stub = InferenceServiceStub(self._open_channel())
            await stub.CancelGenerate(request, timeout=timeout)

    async def tokenize(
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
            return list((await stub.Tokenize(request, timeout=timeout)).token_ids)

    async def detokenize(
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
            return (await stub.Detokenize(request, timeout=timeout)).text

    async def list_models(self, *, timeout_s: float | None = None) -> list[Model]:
        request = model_pb2.ListModelsRequest()
        timeout = deadline("timeout_s", timeout_s)
        with clear_errors(self.target):
            stub = ModelServiceStub(self._open_channel())
            response = await stub.ListModels(request, timeout=timeout)
        return [Model.from_proto(model) for model in response.models]

    async def close(self) -> None:
        """Ends the channel, and with it every call in progress."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    async def _stream(
        self, request: inference_pb2.StreamGenerateRequest, deadline_s: float | None
    ) -> AsyncGenerator[RequestDelta, None]:
        stub = InferenceServiceStub(self._open_channel())
        call = stub.StreamGenerate(request, timeout=deadline_s)
        try:
            with clear_errors(self.target):
                async for message in call:
                    yield RequestDelta.from_proto(message)
        finally:
            call.cancel()

    def _open_channel(self) -> grpc.aio.Channel:
        """Made at the first call, because gRPC ties it to the loop that is running."""
        if self._closed:
            raise ValueError("the client is closed")
        if self._channel is None:
            options = client_options(self.target)
            self._channel = grpc.aio.insecure_channel(self.target, options=options)
        return self._channel

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()
