"""A gRPC server whose responses depend on the prompt's words."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_servers import server_options
from grpc_status import rpc_status

from quire.service.errors import RequestError, invalid, unavailable
from quire.v1 import inference_pb2, model_pb2, tokenizer_pb2
from quire.v1.inference_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)
from quire.v1.model_pb2_grpc import ModelServiceServicer, add_ModelServiceServicer_to_server
from quire.v1.tokenizer_pb2_grpc import (
    TokenizerServiceServicer,
    add_TokenizerServiceServicer_to_server,
)

MAX_CALLS = 16


class ScriptedInference(InferenceServiceServicer):
    """`bad` is refused (`bad later`: once a call hangs); `busy` and `full` return a time to
    retry; `hang` ends with its call, or when it is cancelled by its id; `barrier N` responds once N
    such calls run. The response to other prompts is the prompt in capital letters, with each word
    repeated once more in each further choice. Streams send choices word by word and end the last
    one first."""

    def __init__(self) -> None:
        self.requests: list = []
        # Time left of each call; None without a deadline.
        self.seconds_left: list[float | None] = []
        self.hanging = threading.Event()
        self.released = threading.Event()
        self.cancelled_ids: list[str] = []
        self._hanging_ids: set[str] = set()
        self.num_running = self.max_running = 0
        self._barriers: dict[int, threading.Barrier] = {}
        self._lock = threading.Lock()

    def Generate(self, request, context):  # noqa: N802
        self._follow(request, context)
        choices = [
            inference_pb2.Choice(
                index=index,
                text=" ".join(word * (index + 1) for word in _text(request).upper().split(" ")),
                token_ids=[1, 2],
                logprobs=_logprobs(request, [1, 2]),
                finish_reason=inference_pb2.FINISH_REASON_STOP,
                stop_token_id=2,
            )
            for index in range(_num_choices(request))
        ]
        return inference_pb2.GenerateResponse(
            request_id=request.request_id or "r1",
            model="scripted",
            choices=choices,
            usage=_usage(),
            prompt_logprobs=_prompt_logprobs(request),
            prompt_token_ids=[] if request.HasField("token_ids") else [7, 8, 9],
        )

    def StreamGenerate(self, request, context) -> Iterator:  # noqa: N802
        yield inference_pb2.StreamGenerateResponse(request_id="r1", model="scripted")
        self._follow(request, context)
        choices = range(_num_choices(request))
        for at, word in enumerate(_text(request).upper().split()):
            deltas = [
                inference_pb2.ChoiceDelta(
                    index=index,
                    text="" if word.startswith("(") else word * (index + 1),
                    # Words in parentheses.
                    reasoning=word if word.startswith("(") else "",
                    token_ids=[at],
                    first_token_index=at,
                    logprobs=_logprobs(request, [at]),
                )
                for index in choices
            ]
            of_prompt = [] if at else _prompt_logprobs(request)
            yield inference_pb2.StreamGenerateResponse(
                request_id="r1", deltas=deltas, prompt_logprobs=of_prompt
            )
        for index in reversed(choices):
            end = inference_pb2.ChoiceDelta(
                index=index, finish_reason=inference_pb2.FINISH_REASON_STOP, stop_string="END"
            )
            yield inference_pb2.StreamGenerateResponse(
                request_id="r1", deltas=[end], usage=None if index else _usage()
            )

    def CancelGenerate(self, request, context):  # noqa: N802
        self.cancelled_ids.append(request.request_id)
        if request.request_id in self._hanging_ids:
            self.released.set()
        return inference_pb2.CancelGenerateResponse()

    def _follow(self, request, context) -> None:
        with self._lock:
            self.num_running += 1
            self.max_running = max(self.max_running, self.num_running)
        try:
            self._do(request, context)
        finally:
            with self._lock:
                self.num_running -= 1

    def _do(self, request, context) -> None:
        self.requests.append(request)
        self.seconds_left.append(context.time_remaining())
        match _text(request).split():
            case ["bad", *rest]:
                if rest:
                    self.hanging.wait()
                description = "must not be negative (got -1.0)"
                _abort(context, invalid("sampling_params.temperature", "NEGATIVE", description))
            case ["busy"]:
                _abort(context, unavailable("NO_WORKER", "no worker has joined", 2.5))
            case ["full"]:
                _abort(context, _FULL)
            case ["barrier", number]:
                self._barrier(int(number)).wait()
            case ["hang"]:
                self._hanging_ids.add(request.request_id)
                context.add_callback(self.released.set)
                self.hanging.set()
                self.released.wait()

    def _barrier(self, number: int) -> threading.Barrier:
        with self._lock:
            return self._barriers.setdefault(number, threading.Barrier(number))


class ScriptedTokenizer(TokenizerServiceServicer):
    def Tokenize(self, request, context):  # noqa: N802
        text = request.text or "".join(m.content for m in request.conversation.messages)
        plain = request.HasField("add_special_tokens") and not request.add_special_tokens
        special = [] if plain else [0]
        return tokenizer_pb2.TokenizeResponse(token_ids=[*special, *text.encode()])

    def Detokenize(self, request, context):  # noqa: N802
        return tokenizer_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode())


class ScriptedModels(ModelServiceServicer):
    def ListModels(self, request, context):  # noqa: N802
        model = model_pb2.Model(
            name="scripted", max_model_len=64, vocab_size=256, eos_token_ids=[2]
        )
        return model_pb2.ListModelsResponse(models=[model])

    def GetModel(self, request, context):  # noqa: N802
        raise NotImplementedError


class ScriptedServer:
    """The whole public API on a free port of loopback."""

    def __init__(self) -> None:
        self.inference = ScriptedInference()
        self.health = health.HealthServicer()
        self.health.set("ready", health_pb2.HealthCheckResponse.SERVING)
        self._server = grpc.server(ThreadPoolExecutor(MAX_CALLS), options=server_options())
        add_InferenceServiceServicer_to_server(self.inference, self._server)
        add_TokenizerServiceServicer_to_server(ScriptedTokenizer(), self._server)
        add_ModelServiceServicer_to_server(ScriptedModels(), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def not_ready(self) -> None:
        self.health.set("ready", health_pb2.HealthCheckResponse.NOT_SERVING)

    def stop(self) -> None:
        self.inference.hanging.set()
        self.inference.released.set()
        self._server.stop(None).wait()


_FULL = RequestError(
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    "too many requests wait",
    (
        error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="quire"),
        error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(nanos=500_000_000)),
    ),
)


def _text(request) -> str:
    """The prompt, or the last message of a conversation."""
    messages = request.conversation.messages
    return messages[-1].content if messages else request.text


def _num_choices(request) -> int:
    params = request.sampling_params
    return params.n if params.HasField("n") else 1


def _logprobs(request, token_ids: list[int]) -> list[inference_pb2.TokenLogprobs]:
    """Of a vocabulary in which token i has rank i + 1 and the log-probability -i / 2."""
    params = request.sampling_params
    if not params.HasField("logprobs"):
        return []
    top = [_logprob(token_id) for token_id in range(params.logprobs)]
    return [inference_pb2.TokenLogprobs(sampled=_logprob(id_), top=top) for id_ in token_ids]


def _prompt_logprobs(request) -> list[inference_pb2.TokenLogprobs]:
    """Of a prompt of the tokens 0, 2 and 1."""
    params = request.sampling_params
    if not params.HasField("prompt_logprobs"):
        return []
    top = [_logprob(token_id) for token_id in range(params.prompt_logprobs)]
    known = [inference_pb2.TokenLogprobs(sampled=_logprob(id_), top=top) for id_ in (2, 1)]
    return [inference_pb2.TokenLogprobs(), *known]


def _logprob(token_id: int) -> inference_pb2.TokenLogprob:
    return inference_pb2.TokenLogprob(
        token_id=token_id, logprob=-token_id / 2, rank=token_id + 1, text=f"t{token_id}"
    )


def _usage() -> inference_pb2.Usage:
    return inference_pb2.Usage(prompt_tokens=3, cached_prompt_tokens=1, completion_tokens=2)


def _abort(context, error: RequestError) -> None:
    status = status_pb2.Status(
        code=error.code.value[0], message=error.message, details=error.packed_details()
    )
    context.abort_with_status(rpc_status.to_status(status))
