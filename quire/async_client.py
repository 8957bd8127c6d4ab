"""The API call by call, for programs that run in an event loop."""

from collections.abc import AsyncGenerator, Sequence
from typing import Self, Unpack

import grpc

from quire.errors import clear_errors
from quire.outputs import Model, RequestDelta, RequestOutput
from quire.prompts import Conversation, Prompt
from quire.requests import RequestOptions, fill_request, request_output, tokenize_request
from quire.sampling import SamplingParams
from quire.targets import client_options
from quire.v1 import inference_pb2, model_pb2, tokenizer_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from quire.v1.model_pb2_grpc import ModelServiceStub
from quire.v1.tokenizer_pb2_grpc import TokenizerServiceStub


class AsyncClient:
    """One channel to a server at `host:port` or `unix:/path`, for one event loop.

    Every call raises QuireError where the server, or the way to it, fails; cancelling the task
    cancels the call. `timeout_s` is the call's deadline: the server stops working on it, too.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self._channel = grpc.aio.insecure_channel(target, options=client_options(target))
        self._inference = InferenceServiceStub(self._channel)
        self._tokenizer = TokenizerServiceStub(self._channel)
        self._models = ModelServiceStub(self._channel)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        request = fill_request(inference_pb2.GenerateRequest(), prompt, sampling_params, options)
        with clear_errors(self.target):
            return request_output(
                request, await self._inference.Generate(request, timeout=timeout_s)
            )

    async def stream_generate(
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
        call = self._inference.StreamGenerate(request, timeout=timeout_s)
        try:
            with clear_errors(self.target):
                async for message in call:
                    yield RequestDelta.from_proto(message)
        finally:
            call.cancel()

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> None:
        """Ends a request by its id; the call that waits for it fails with CANCELLED."""
        request = inference_pb2.CancelGenerateRequest(request_id=request_id)
        with clear_errors(self.target):
            await self._inference.CancelGenerate(request, timeout=timeout_s)

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
        with clear_errors(self.target):
            return list((await self._tokenizer.Tokenize(request, timeout=timeout_s)).token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> str:
        request = tokenizer_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        with clear_errors(self.target):
            return (await self._tokenizer.Detokenize(request, timeout=timeout_s)).text

    async def list_models(self, *, timeout_s: float | None = None) -> list[Model]:
        request = model_pb2.ListModelsRequest()
        with clear_errors(self.target):
            response = await self._models.ListModels(request, timeout=timeout_s)
        return [Model.from_proto(model) for model in response.models]

    async def close(self) -> None:
        """Ends the channel, and with it every call in progress."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()
