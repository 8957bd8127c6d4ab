"""The API call by call, for programs without an event loop (or with one that is not ours)."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from typing import Protocol, Self, TypeVar, Unpack

import grpc

from quire.arguments import deadline
from quire.batch import Batch, MethodAt
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
from quire.resumption import Answer, Resumption
from quire.sampling import SamplingParams
from quire.targets import Targets, client_options
from quire.v1 import inference_pb2, model_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from quire.v1.model_pb2_grpc import ModelServiceStub
from quire.v1.tokenizer_pb2_grpc import TokenizerServiceStub

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class _Stream(Protocol):
    """A call whose answers are read one by one."""

    def __iter__(self) -> Iterator[Answer]: ...
    def cancel(self) -> bool: ...
    def is_active(self) -> bool: ...


class Client:
    """Talks to a server at `host:port` or `unix:/path`, or to the gateways of one service at
    several such addresses, separated by commas. Safe to share between threads.

    What breaks is taken up again, at the next address, by itself: a stream goes on behind the
    tokens that have come, everything else is sent again. This ends when nothing has come for
    `resume_timeout_s`; with 0 the first failure is the last.

    Every call raises QuireError where the server, or the way to it, fails, TypeError or ValueError
    for arguments that cannot be sent, and ValueError once the client is closed. `timeout_s` is the
    deadline of a call with all that is sent for it: the server stops working on it, too; None or
    infinity sets none.
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
        self._channels = {
            address: grpc.insecure_channel(address, options=client_options(address))
            for address in self._targets.addresses
        }
        # Made once: a stub costs about as much as the call that is made with it.
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
        responses = self._call_all(lambda at: self._inference(at).Generate, requests, timeout_s)
        return [request_output(*pair) for pair in zip(requests, responses, strict=True)]

    def stream_generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generator[RequestDelta, None, None]:
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
    ) -> Generator[RequestDelta, None, None]:
        """The rest of a stream that another program began, or this one before it was started
        again: what comes after the tokens that are there.

        `next_token_indices` has for each completion the `first_token_index` of its last delta plus
        the number of that delta's `token_ids`; 0 where absent. The request is taken from whoever
        streams it. QuireError NOT_FOUND if it is not known, or not any more.
        """
        check_resumption(request_id, next_token_indices)
        patience = self._patience(timeout_s)
        return self._stream(Resumption(patience, request_id, None, next_token_indices))

    def cancel(self, request_id: str, *, timeout_s: float | None = None) -> None:
        """Ends a request by its id; the call that waits for it fails with CANCELLED."""
        request = cancel_request(request_id)
        self._call(lambda at: self._inference(at).CancelGenerate, request, timeout_s)

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
        response = self._call(lambda at: self._tokenizer(at).Tokenize, request, timeout_s)
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
        response = self._call(lambda at: self._tokenizer(at).Detokenize, request, timeout_s)
        return response.text

    def list_models(self, *, timeout_s: float | None = None) -> list[Model]:
        request = model_pb2.ListModelsRequest()
        response = self._call(lambda at: self._models(at).ListModels, request, timeout_s)
        return [Model.from_proto(model) for model in response.models]

    def close(self) -> None:
        """Ends the channels, and with them every call in progress."""
        self._closed = True
        for channel in self._channels.values():
            channel.close()

    def _call(
        self, method_at: "MethodAt[_Request, _Response]", request: _Request, timeout_s: float | None
    ) -> _Response:
        return self._call_all(method_at, [request], timeout_s)[0]

    def _call_all(
        self,
        method_at: "MethodAt[_Request, _Response]",
        requests: Sequence[_Request],
        timeout_s: float | None,
    ) -> list[_Response]:
        return Batch(method_at, requests, [self._patience(timeout_s) for _ in requests]).run()

    def _stream(self, state: Resumption) -> Generator[RequestDelta, None, None]:
        call = None
        try:
            while not state.is_complete:
                call = self._begin(state)
                try:
                    yield from self._deltas(call, state)
                    state.ended()
                    return
                except QuireError as error:
                    call.cancel()
                    if not state.is_complete:
                        time.sleep(state.failed(error))
        finally:
            self._leave(call, state)

    def _begin(self, state: Resumption) -> _Stream:
        timeout = state.patience.begin()
        stub = self._inference(state.patience.target)
        ask = state.ask()
        if isinstance(ask, inference_pb2.ResumeGenerateRequest):
            return stub.ResumeGenerate(ask, timeout=timeout)
        return stub.StreamGenerate(ask, timeout=timeout)

    def _deltas(self, call: _Stream, state: Resumption) -> Generator[RequestDelta, None, None]:
        with clear_errors(state.patience.target):
            for message in call:
                delta = state.take(message)
                if delta is not None:
                    yield delta

    def _leave(self, call: _Stream | None, state: Resumption) -> None:
        """Nobody listens any more: ends the request, wherever it is."""
        if call is not None and call.is_active():
            call.cancel()
        elif state.runs_unheard and not self._closed:
            request = cancel_request(state.request_id)
            with suppress(grpc.RpcError, ValueError):
                stub = self._inference(state.patience.target)
                stub.CancelGenerate(request, timeout=CANCEL_TIMEOUT_S)

    def _patience(self, timeout_s: float | None) -> Patience:
        timeout = deadline("timeout_s", timeout_s)
        return Patience(self._targets, self._resume_timeout_s, timeout, on_break=self._on_break)

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
