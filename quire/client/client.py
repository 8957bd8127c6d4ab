"""The synchronous client."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from typing import Literal, Protocol, Self, TypeVar, Unpack, overload

import grpc

from quire.client.arguments import deadline
from quire.client.concurrent_calls import ConcurrentCalls, StubMethodFor
from quire.client.conversations import Conversation
from quire.client.errors import QuireError, ignore_repeated_cancel, translate_errors
from quire.client.outputs import BeamSearchOutput, Model, RequestDelta, RequestOutput
from quire.client.prompt_batch import OnEnd, PromptBatch
from quire.client.prompts import Prompt, several_prompts
from quire.client.requests import (
    RequestOptions,
    beam_search_output,
    beam_search_request,
    cancel_request,
    check_ids,
    check_resumption,
    detokenize_request,
    fill_request,
    tokenize_request,
)
from quire.client.resumable_stream import ResumableStream, StreamResponse
from quire.client.retry_policy import (
    CANCEL_TIMEOUT_S,
    RESUME_TIMEOUT_S,
    RetryPolicy,
    resume_timeout,
)
from quire.client.sampling_params import BeamSearchParams, SamplingParams
from quire.client.targets import Targets, client_options, key_metadata
from quire.service.tls import TLS, open_channel
from quire.v1 import inference_pb2, model_pb2
from quire.v1.beam_search_pb2_grpc import BeamSearchServiceStub
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from quire.v1.model_pb2_grpc import ModelServiceStub
from quire.v1.tokenizer_pb2_grpc import TokenizerServiceStub

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class _Stream(Protocol):
    """A streaming call."""

    def __iter__(self) -> Iterator[StreamResponse]: ...
    def cancel(self) -> bool: ...
    def is_active(self) -> bool: ...


class Client:
    """A client of a server at `host:port` or `unix:/path`, or of several gateways whose addresses
    are separated by commas. Thread-safe.

    After a connection failure the client retries at the next address: a stream continues after the
    last received token, other calls are sent again. A gateway that notices that only its client's
    connection broke ends a stream without a `resume_window_s`, which then begins again, or fails
    with UnavailableError if it has tokens. The client gives up after `resume_timeout_s` without
    progress; 0 disables retries.

    Calls raise QuireError if the server or the connection fails, TypeError or ValueError for
    invalid arguments, and ValueError after `close`. `timeout_s` is the deadline of a call including
    its retries, after which the server ends it; None or infinity sets none.
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
        self._resume_timeout_s = resume_timeout(resume_timeout_s)
        self._on_break = on_break
        self.target = target
        self._channels = {
            address: open_channel(address, client_options(address), tls)
            for address in self._targets.addresses
        }
        # Reused, because creating a stub costs as much as a call.
        self._inference_stubs = {
            address: InferenceServiceStub(channel) for address, channel in self._channels.items()
        }
        self._closed = False

    @property
    def current_target(self) -> str:
        """The address that served last, or the first one."""
        return self._targets.current

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        return self.generate_all([prompt], [sampling_params], timeout_s=timeout_s, **options)[0]

    @overload
    def generate_all(
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
    def generate_all(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Sequence[SamplingParams | None],
        *,
        timeout_s: float | None = None,
        return_exceptions: bool,
        on_end: OnEnd | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput | Exception]: ...

    def generate_all(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Sequence[SamplingParams | None],
        *,
        timeout_s: float | None = None,
        return_exceptions: bool = False,
        on_end: OnEnd | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput] | list[RequestOutput | Exception]:
        """Send all prompts concurrently and return outputs in their order.

        The first failure is raised and cancels all other requests; with `return_exceptions` each
        failure takes the place of its output. `on_end` is called with each output or failure as
        soon as there is one.
        """
        batch = PromptBatch(prompts, sampling_params, options, return_exceptions, on_end)
        calls = self._calls(
            lambda target: self._inference(target).Generate, batch.requests, timeout_s
        )
        calls.run_each(batch.take)
        return batch.results

    def stream_generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generator[RequestDelta, None, None]:
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
    ) -> Generator[RequestDelta, None, None]:
        """Continue a stream of another client, which then fails, or of an ended process.

        `next_token_indices` has one entry per completion: the `first_token_index` of its last
        received delta plus the number of that delta's `token_ids`, 0 if absent. QuireError
        NOT_FOUND if the server does not have the request.
        """
        check_resumption(request_id, next_token_indices)
        retry_policy = self._retry_policy(timeout_s)
        return self._stream(ResumableStream(retry_policy, request_id, None, next_token_indices))

    def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> BeamSearchOutput:
        """Find the most likely continuations of a prompt."""
        return self.beam_search_all([prompt], params, timeout_s=timeout_s, **options)[0]

    def beam_search_all(
        self,
        prompts: Sequence[Prompt],
        params: BeamSearchParams | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[BeamSearchOutput]:
        """Search all prompts concurrently. The first failure is raised and cancels the others."""
        each = several_prompts(prompts)
        check_ids(options, len(each))
        requests = [beam_search_request(prompt, params, options) for prompt in each]
        calls = self._calls(
            lambda target: BeamSearchServiceStub(self._channel(target)).BeamSearch,
            requests,
            timeout_s,
        )
        return [beam_search_output(*pair) for pair in zip(requests, calls.run(), strict=True)]

    def cancel(self, request_id: str, *, timeout_s: float | None = None) -> None:
        """Cancel a live request by its id; its call fails with CANCELLED."""
        request = cancel_request(request_id)
        with ignore_repeated_cancel():
            self._call(lambda target: self._inference(target).CancelGenerate, request, timeout_s)

    def tokenize(
        self,
        prompt: str | Conversation,
        *,
        add_special_tokens: bool | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """The token ids of a text, or of a conversation rendered by the chat template."""
        request = tokenize_request(prompt, add_special_tokens, model)
        response = self._call(lambda target: self._tokenizer(target).Tokenize, request, timeout_s)
        return list(response.token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> str:
        request = detokenize_request(token_ids, skip_special_tokens, model)
        response = self._call(lambda target: self._tokenizer(target).Detokenize, request, timeout_s)
        return response.text

    def list_models(self, *, timeout_s: float | None = None) -> list[Model]:
        request = model_pb2.ListModelsRequest()
        response = self._call(lambda target: self._models(target).ListModels, request, timeout_s)
        return [Model.from_proto(model) for model in response.models]

    def close(self) -> None:
        """Close the channels. Calls in progress, in other threads, fail with CANCELLED."""
        self._closed = True
        for channel in self._channels.values():
            channel.close()

    def _call(
        self,
        method_for: "StubMethodFor[_Request, _Response]",
        request: _Request,
        timeout_s: float | None,
    ) -> _Response:
        return self._calls(method_for, [request], timeout_s).run()[0]

    def _calls(
        self,
        method_for: "StubMethodFor[_Request, _Response]",
        requests: Sequence[_Request],
        timeout_s: float | None,
    ) -> ConcurrentCalls[_Request, _Response]:
        retry_policies = [self._retry_policy(timeout_s) for _ in requests]
        return ConcurrentCalls(method_for, requests, retry_policies, self._metadata)

    def _stream(self, stream: ResumableStream) -> Generator[RequestDelta, None, None]:
        call = None
        try:
            while not stream.is_complete:
                call = self._begin(stream)
                try:
                    with translate_errors(stream.retry_policy.target):
                        for message in call:
                            if (delta := stream.take(message)) is not None:
                                yield delta
                    stream.mark_ended()
                    return
                except QuireError as error:
                    call.cancel()
                    if not stream.is_complete:
                        time.sleep(stream.backoff_s(error))
        finally:
            self._cancel_unfinished(call, stream)

    def _begin(self, stream: ResumableStream) -> _Stream:
        timeout = stream.retry_policy.begin_attempt()
        stub = self._inference(stream.retry_policy.target)
        request = stream.next_request()
        if isinstance(request, inference_pb2.ResumeGenerateRequest):
            return stub.ResumeGenerate(request, timeout=timeout, metadata=self._metadata)
        return stub.StreamGenerate(request, timeout=timeout, metadata=self._metadata)

    def _cancel_unfinished(self, call: _Stream | None, stream: ResumableStream) -> None:
        if call is not None and call.is_active():
            call.cancel()
        elif stream.needs_cancel and not self._closed:
            request = cancel_request(stream.request_id)
            with suppress(grpc.RpcError, ValueError):
                stub = self._inference(stream.retry_policy.target)
                stub.CancelGenerate(request, timeout=CANCEL_TIMEOUT_S, metadata=self._metadata)

    def _retry_policy(self, timeout_s: float | None) -> RetryPolicy:
        timeout = deadline("timeout_s", timeout_s)
        return RetryPolicy(
            self._targets,
            self._resume_timeout_s,
            timeout,
            on_break=self._on_break,
            is_closed=lambda: self._closed,
        )

    def _inference(self, target: str) -> InferenceServiceStub:
        self._check_open()
        return self._inference_stubs[target]

    def _tokenizer(self, target: str) -> TokenizerServiceStub:
        return TokenizerServiceStub(self._channel(target))

    def _models(self, target: str) -> ModelServiceStub:
        return ModelServiceStub(self._channel(target))

    def _channel(self, target: str) -> grpc.Channel:
        self._check_open()
        return self._channels[target]

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the client is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
