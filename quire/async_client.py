"""The API call by call, for programs that run in an event loop."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Self, TypeAlias, TypeVar, Unpack

import grpc

from quire.arguments import deadline
from quire.errors import QuireError, clear_errors
from quire.outputs import Model, RequestDelta, RequestOutput
from quire.patience import CANCEL_TIMEOUT_S, RESUME_TIMEOUT_S, Patience, resume_timeout
from quire.prompts import Conversation, Prompt
from quire.requests import (
    RequestOptions,
    cancel_request,
    check_resumption,
    detokenize_request,
    fill_request,
    request_output,
    tokenize_request,
)
from quire.resumption import Resumption
from quire.sampling import SamplingParams
from quire.targets import Targets, client_options
from quire.v1 import inference_pb2, model_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from quire.v1.model_pb2_grpc import ModelServiceStub
from quire.v1.tokenizer_pb2_grpc import TokenizerServiceStub

if TYPE_CHECKING:
    # They exist for type checkers only.
    from quire.v1.inference_pb2_grpc import InferenceServiceAsyncStub
    from quire.v1.model_pb2_grpc import ModelServiceAsyncStub
    from quire.v1.tokenizer_pb2_grpc import TokenizerServiceAsyncStub

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
# The classes cannot be subscripted when they run.
_MethodAt: TypeAlias = "Callable[[str], grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]]"
_Stream: TypeAlias = (
    "grpc.aio.UnaryStreamCall[inference_pb2.StreamGenerateRequest,"
    " inference_pb2.StreamGenerateResponse]"
    " | grpc.aio.UnaryStreamCall[inference_pb2.ResumeGenerateRequest,"
    " inference_pb2.ResumeGenerateResponse]"
)


class AsyncClient:
    """Talks to a server at `host:port` or `unix:/path`, or to the gateways of one service at
    several such addresses, separated by commas; in the event loop of its first call.

    What breaks is taken up again, at the next address, by itself: a stream goes on behind the
    tokens that have come, everything else is sent again. This ends when nothing has come for
    `resume_timeout_s`; with 0 the first failure is the last.

    Every call raises QuireError where the server, or the way to it, fails, TypeError or ValueError
    for arguments that cannot be sent, and ValueError once the client is closed. Cancelling the task
    cancels the call. `timeout_s` is the deadline of a call with all that is sent for it: the server
    stops working on it, too; None or infinity sets none.
    """

    def __init__(
        self,
        target: str,
        *,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
        on_break: Callable[[QuireError], object] | None = None,
    ) -> None:
        """`on_break` hears of each failure after which the client goes on."""
        self._targets = Targets(target)
        self._resume_timeout_s = resume_timeout(resume_timeout_s)
        self._on_break = on_break
        self.target = target
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._inference_stubs: dict[str, InferenceServiceAsyncStub] = {}
        self._closed = False

    @property
    def current_target(self) -> str:
        """The address that served last, or the first one."""
        return self._targets.current

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        request = fill_request(inference_pb2.GenerateRequest(), prompt, sampling_params, options)
        response = await self._call(lambda at: self._inference(at).Generate, request, timeout_s)
        return request_output(request, response)

    def stream_generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestDelta, None]:
        """The output as it is written. Closing the generator cancels the request, unless that has
        a `resume_window_s`."""
        request = fill_request(
            inference_pb2.StreamGenerateRequest(), prompt, sampling_params, options
        )
        patience = self._patience(timeout_s)
        return self._stream(Resumption(patience, request.request_id, request))

    def resume(
        self,
        request_id: str,
        next_token_indices: Sequence[int] = (),
        *,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestDelta, None]:
        """The rest of a stream that another program began, or this one before it was started
        again: what comes after the tokens that are there.

        `next_token_indices` has for each completion the `first_token_index` of its last delta plus
        the number of that delta's `token_ids`; 0 where absent. The request is taken from whoever
        streams it. QuireError NOT_FOUND if it is not known, or not any more.
        """
        check_resumption(request_id, next_token_indices)
        patience = self._patience(timeout_s)
        return self._stream(Resumption(patience, request_id, None, next_token_indices))

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> None:
        """Ends a request by its id; the call that waits for it fails with CANCELLED."""
        request = cancel_request(request_id)
        await self._call(lambda at: self._inference(at).CancelGenerate, request, timeout_s)

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
        response = await self._call(lambda at: self._tokenizer(at).Tokenize, request, timeout_s)
        return list(response.token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> str:
        request = detokenize_request(token_ids, skip_special_tokens, model)
        response = await self._call(lambda at: self._tokenizer(at).Detokenize, request, timeout_s)
        return response.text

    async def list_models(self, *, timeout_s: float | None = None) -> list[Model]:
        request = model_pb2.ListModelsRequest()
        response = await self._call(lambda at: self._models(at).ListModels, request, timeout_s)
        return [Model.from_proto(model) for model in response.models]

    async def close(self) -> None:
        """Ends the channels, and with them every call in progress."""
        self._closed = True
        for channel in self._channels.values():
            await channel.close()

    async def _call(
        self,
        method_at: "_MethodAt[_Request, _Response]",
        request: _Request,
        timeout_s: float | None,
    ) -> _Response:
        patience = self._patience(timeout_s)
        while True:
            timeout = patience.begin()
            method = method_at(patience.target)
            try:
                with clear_errors(patience.target):
                    response = await method(request, timeout=timeout)
            except QuireError as error:
                await asyncio.sleep(patience.failed(error))
            else:
                patience.progress()
                return response

    async def _stream(self, state: Resumption) -> AsyncGenerator[RequestDelta, None]:
        call = None
        try:
            while not state.is_complete:
                call = self._begin(state)
                try:
                    with clear_errors(state.patience.target):
                        async for message in call:
                            if (delta := state.take(message)) is not None:
                                yield delta
                    state.ended()
                    return
                except QuireError as error:
                    call.cancel()
                    if not state.is_complete:
                        await asyncio.sleep(state.failed(error))
        finally:
            await self._leave(call, state)

    def _begin(self, state: Resumption) -> _Stream:
        timeout = state.patience.begin()
        stub = self._inference(state.patience.target)
        ask = state.ask()
        if isinstance(ask, inference_pb2.ResumeGenerateRequest):
            return stub.ResumeGenerate(ask, timeout=timeout)
        return stub.StreamGenerate(ask, timeout=timeout)

    async def _leave(self, call: "_Stream | None", state: Resumption) -> None:
        """Nobody listens any more: ends the request, wherever it is."""
        if call is not None and not call.done():
            call.cancel()
        elif state.runs_unheard and not self._closed:
            request = cancel_request(state.request_id)
            with suppress(grpc.RpcError, ValueError):
                stub = self._inference(state.patience.target)
                await stub.CancelGenerate(request, timeout=CANCEL_TIMEOUT_S)

    def _patience(self, timeout_s: float | None) -> Patience:
        timeout = deadline("timeout_s", timeout_s)
        return Patience(self._targets, self._resume_timeout_s, timeout, on_break=self._on_break)

    def _inference(self, target: str) -> "InferenceServiceAsyncStub":
        """Made once: a stub costs about as much as the call that is made with it."""
        channel = self._channel(target)
        if target not in self._inference_stubs:
            self._inference_stubs[target] = InferenceServiceStub(channel)
        return self._inference_stubs[target]

    def _tokenizer(self, target: str) -> "TokenizerServiceAsyncStub":
        return TokenizerServiceStub(self._channel(target))

    def _models(self, target: str) -> "ModelServiceAsyncStub":
        return ModelServiceStub(self._channel(target))

    def _channel(self, target: str) -> grpc.aio.Channel:
        """Made at the first call, because gRPC ties it to the loop that is running."""
        if self._closed:
            raise ValueError("the client is closed")
        if target not in self._channels:
            options = client_options(target)
            self._channels[target] = grpc.aio.insecure_channel(target, options=options)
        return self._channels[target]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()
