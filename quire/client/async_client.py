"""The asyncio client."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, Self, TypeAlias, TypeVar, Unpack, overload

import grpc

from quire.client.arguments import deadline
from quire.client.concurrent_calls import AioCallLimit, run_each_aio
from quire.client.conversations import Conversation
from quire.client.errors import QuireError, ignore_repeated_cancel, translate_aio_errors
from quire.client.outputs import BeamSearchOutput, Model, RequestDelta, RequestOutput
from quire.client.prompt_batch import OnEnd, PromptBatch
from quire.client.prompts import Prompt
from quire.client.requests import (
    RequestOptions,
    beam_search_output,
    beam_search_request,
    cancel_request,
    check_resumption,
    detokenize_request,
    fill_request,
    request_output,
    tokenize_request,
)
from quire.client.resumable_stream import AioStream, ResumableStream
from quire.client.retry_policy import (
    CANCEL_TIMEOUT_S,
    RESUME_TIMEOUT_S,
    RetryPolicy,
    resume_timeout,
)
from quire.client.sampling_params import BeamSearchParams, SamplingParams
from quire.client.targets import Targets, client_options, key_metadata
from quire.service.tls import TLS, open_aio_channel
from quire.v1 import inference_pb2, model_pb2
from quire.v1.beam_search_pb2_grpc import BeamSearchServiceStub
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from quire.v1.model_pb2_grpc import ModelServiceStub
from quire.v1.tokenizer_pb2_grpc import TokenizerServiceStub

if TYPE_CHECKING:
    # Defined only in type stubs.
    from quire.v1.inference_pb2_grpc import InferenceServiceAsyncStub
    from quire.v1.model_pb2_grpc import ModelServiceAsyncStub
    from quire.v1.tokenizer_pb2_grpc import TokenizerServiceAsyncStub

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
# The classes cannot be subscripted at run time.
_StubMethodFor: TypeAlias = "Callable[[str], grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]]"


class AsyncClient:
    """The asyncio variant of `Client`: the same methods except `beam_search_all`, and the same
    arguments, errors and retries.

    It belongs to the event loop of its first call: RuntimeError for a call in another one.
    Cancelling a task cancels its call.
    """

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        tls: TLS | None = None,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
        on_break: Callable[[QuireError], object] | None = None,
    ) -> None:
        """`api_key` is sent with each call. `tls` is for servers with TLS; without it channels are
        not encrypted. `on_break` is called with each failure that is retried."""
        self._targets = Targets(target)
        self._metadata = key_metadata(api_key)
        self._tls = tls
        self._resume_timeout_s = resume_timeout(resume_timeout_s)
        self._on_break = on_break
        self.target = target
        self._loop: asyncio.AbstractEventLoop | None = None
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
        response = await self._call(
            lambda target: self._inference(target).Generate, request, self._retry_policy(timeout_s)
        )
        return request_output(request, response)

    @overload
    async def generate_all(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Sequence[SamplingParams | None],
        *,
        timeout_s: float | None = None,
        return_exceptions: Literal[False] = False,
        on_end: OnEnd | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]: ...

    @overload
    async def generate_all(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Sequence[SamplingParams | None],
        *,
        timeout_s: float | None = None,
        return_exceptions: bool,
        on_end: OnEnd | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput | Exception]: ...

    async def generate_all(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Sequence[SamplingParams | None],
        *,
        timeout_s: float | None = None,
        return_exceptions: bool = False,
        on_end: OnEnd | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput] | list[RequestOutput | Exception]:
        """Send all prompts concurrently; see `Client.generate_all`."""
        batch = PromptBatch(prompts, sampling_params, options, return_exceptions, on_end)
        await run_each_aio(
            lambda call, limit: self._call(
                lambda target: self._inference(target).Generate, *call, limit
            ),
            # Their deadlines count from now, also of those that wait for others.
            [(request, self._retry_policy(timeout_s)) for request in batch.requests],
            batch.take,
        )
        return batch.results

    def stream_generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestDelta, None]:
        """Stream the output. Closing the generator cancels the request unless it has a
        `resume_window_s`."""
        request = fill_request(
            inference_pb2.StreamGenerateRequest(), prompt, sampling_params, options
        )
        retry_policy = self._retry_policy(timeout_s)
        return self._stream(ResumableStream(retry_policy, request.request_id, request))

    def resume(
        self,
        request_id: str,
        next_token_indices: Sequence[int] = (),
        *,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestDelta, None]:
        """Continue a stream of another client; see `Client.resume`."""
        check_resumption(request_id, next_token_indices)
        retry_policy = self._retry_policy(timeout_s)
        return self._stream(ResumableStream(retry_policy, request_id, None, next_token_indices))

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> BeamSearchOutput:
        """Find the most likely continuations of a prompt."""
        request = beam_search_request(prompt, params, options)
        response = await self._call(
            lambda target: BeamSearchServiceStub(self._channel(target)).BeamSearch,
            request,
            self._retry_policy(timeout_s),
        )
        return beam_search_output(request, response)

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> None:
        """Cancel a request by its id; see `Client.cancel`."""
        request = cancel_request(request_id)
        retry_policy = self._retry_policy(timeout_s)
        with ignore_repeated_cancel():
            await self._call(
                lambda target: self._inference(target).CancelGenerate, request, retry_policy
            )

    async def tokenize(
        self,
        prompt: str | Conversation,
        *,
        add_special_tokens: bool | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """The token ids of a text, or of a conversation rendered by the chat template."""
        request = tokenize_request(prompt, add_special_tokens, model)
        response = await self._call(
            lambda target: self._tokenizer(target).Tokenize, request, self._retry_policy(timeout_s)
        )
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
        response = await self._call(
            lambda target: self._tokenizer(target).Detokenize,
            request,
            self._retry_policy(timeout_s),
        )
        return response.text

    async def list_models(self, *, timeout_s: float | None = None) -> list[Model]:
        request = model_pb2.ListModelsRequest()
        response = await self._call(
            lambda target: self._models(target).ListModels, request, self._retry_policy(timeout_s)
        )
        return [Model.from_proto(model) for model in response.models]

    async def close(self) -> None:
        """Close the channels. Calls in progress fail with CANCELLED."""
        self._closed = True
        for channel in self._channels.values():
            await channel.close()

    async def _call(
        self,
        method_for: "_StubMethodFor[_Request, _Response]",
        request: _Request,
        retry_policy: RetryPolicy,
        limit: AioCallLimit | None = None,
    ) -> _Response:
        limit = limit or AioCallLimit()
        while True:
            async with limit.attempt() as halvings_before:
                timeout = retry_policy.begin_attempt()
                method = method_for(retry_policy.target)
                try:
                    with translate_aio_errors(retry_policy.target, lambda: self._closed):
                        response = await method(request, timeout=timeout, metadata=self._metadata)
                except QuireError as error:
                    backoff_s = retry_policy.backoff_s(error)
                    limit.halve(halvings_before)
                else:
                    retry_policy.record_progress()
                    limit.grow(halvings_before)
                    return response
            await asyncio.sleep(backoff_s)

    async def _stream(self, stream: ResumableStream) -> AsyncGenerator[RequestDelta, None]:
        call = None
        try:
            while not stream.is_complete:
                call = self._begin(stream)
                try:
                    with translate_aio_errors(stream.retry_policy.target, lambda: self._closed):
                        async for message in call:
                            if (delta := stream.take(message)) is not None:
                                yield delta
                    stream.mark_ended()
                    return
                except QuireError as error:
                    call.cancel()
                    if not stream.is_complete:
                        await asyncio.sleep(stream.backoff_s(error))
        finally:
            await self._cancel_unfinished(call, stream)

    def _begin(self, stream: ResumableStream) -> AioStream:
        timeout = stream.retry_policy.begin_attempt()
        stub = self._inference(stream.retry_policy.target)
        request = stream.next_request()
        if isinstance(request, inference_pb2.ResumeGenerateRequest):
            return stub.ResumeGenerate(request, timeout=timeout, metadata=self._metadata)
        return stub.StreamGenerate(request, timeout=timeout, metadata=self._metadata)

    async def _cancel_unfinished(self, call: "AioStream | None", stream: ResumableStream) -> None:
        if call is not None and not call.done():
            call.cancel()
        elif stream.needs_cancel and not self._closed:
            request = cancel_request(stream.request_id)
            with suppress(grpc.RpcError, ValueError):
                stub = self._inference(stream.retry_policy.target)
                await stub.CancelGenerate(
                    request, timeout=CANCEL_TIMEOUT_S, metadata=self._metadata
                )

    def _retry_policy(self, timeout_s: float | None) -> RetryPolicy:
        timeout = deadline("timeout_s", timeout_s)
        return RetryPolicy(
            self._targets,
            self._resume_timeout_s,
            timeout,
            on_break=self._on_break,
            is_closed=lambda: self._closed,
        )

    def _inference(self, target: str) -> "InferenceServiceAsyncStub":
        """Stubs are reused, because creating one costs as much as a call."""
        channel = self._channel(target)
        if target not in self._inference_stubs:
            self._inference_stubs[target] = InferenceServiceStub(channel)
        return self._inference_stubs[target]

    def _tokenizer(self, target: str) -> "TokenizerServiceAsyncStub":
        return TokenizerServiceStub(self._channel(target))

    def _models(self, target: str) -> "ModelServiceAsyncStub":
        return ModelServiceStub(self._channel(target))

    def _channel(self, target: str) -> grpc.aio.Channel:
        """Created at the first call, because gRPC binds a channel to the running event loop."""
        if self._closed:
            raise ValueError("the client is closed")
        if self._loop not in (None, loop := asyncio.get_running_loop()):
            raise RuntimeError("the client belongs to another event loop: make one for each loop")
        self._loop = loop
        if target not in self._channels:
            self._channels[target] = open_aio_channel(target, client_options(target), self._tls)
        return self._channels[target]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()
