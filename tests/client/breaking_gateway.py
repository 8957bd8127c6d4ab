"""A gRPC server whose streams fail as scripted."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
from google.rpc import status_pb2
from grpc_servers import server_options
from grpc_status import rpc_status

from quire.service.errors import RequestError, failed, unavailable
from quire.v1 import inference_pb2
from quire.v1.inference_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)

BROKEN = RequestError(grpc.StatusCode.UNAVAILABLE, "the connection is lost")
# Without details, as gRPC resets calls that a stopping server has not accepted.
RESET = RequestError(grpc.StatusCode.CANCELLED, "CANCELLED")
DRAINING = unavailable("DRAINING", "the gateway stops", metadata={"resumable": "true"})
SLOW = failed(
    grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER", "slow", metadata={"resumable": "true"}
)
CANCELLED = failed(grpc.StatusCode.CANCELLED, "CANCELLED", "the request was cancelled")
TAKEN_OVER = failed(
    grpc.StatusCode.ABORTED, "TAKEN_OVER", "taken over", metadata={"resumable": "true"}
)
UNKNOWN = failed(
    grpc.StatusCode.NOT_FOUND, "UNKNOWN_REQUEST", "not known", metadata={"resumable": "false"}
)
UNKNOWN_MODEL = failed(grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL", "model: no model 'x'")
REFUSED = failed(grpc.StatusCode.INVALID_ARGUMENT, "BAD", "bad")

# The text of choice c is "c0 c1 c2 ...", one token per word, with log-probabilities.
NUM_TOKENS = 6


class ScriptedCall:
    """The script of one call: where its response begins and how it ends."""

    def __init__(
        self,
        error: RequestError | None = None,
        after: int | None = None,
        *,
        skew: int = 0,
        hang: bool = False,
    ) -> None:
        """The call fails with `error`, or hangs, after `after` messages, by default all. Responses
        begin `skew` tokens away from the requested one."""
        self.error = error
        self.after = after
        self.skew = skew
        self.hang = hang


class Gateway(InferenceServiceServicer):
    """Responds to each call by the next entry of its script, and in full after the last one."""

    def __init__(self, *script: ScriptedCall) -> None:
        self.script = list(script)
        # Of CancelGenerate; it succeeds after the last entry.
        self.cancel_script: list[ScriptedCall] = []
        self.requests: list = []
        self.seconds_left: list[float | None] = []
        self.cancelled_ids: list[str] = []
        self.cancelled = threading.Event()
        self.hanging = threading.Event()
        self._released = threading.Event()
        self._lock = threading.Lock()
        self._server = grpc.server(ThreadPoolExecutor(8), options=server_options())
        add_InferenceServiceServicer_to_server(self, self._server)
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Generate(self, request, context):  # noqa: N802
        one = self._next_call(request, context)
        self._end(one, context)
        return inference_pb2.GenerateResponse(
            request_id=request.request_id, usage=inference_pb2.Usage(completion_tokens=NUM_TOKENS)
        )

    def StreamGenerate(self, request, context) -> Iterator:  # noqa: N802
        one = self._next_call(request, context)
        n = request.sampling_params.n or 1
        yield from self._messages(one, context, request.request_id, [0] * n)

    def ResumeGenerate(self, request, context) -> Iterator:  # noqa: N802
        one = self._next_call(request, context)
        begins = [index + one.skew for index in request.next_token_indices] or [0]
        yield from self._messages(one, context, request.request_id, begins)

    def CancelGenerate(self, request, context):  # noqa: N802
        self.cancelled_ids.append(request.request_id)
        self.cancelled.set()
        if self.cancel_script:
            self._end(self.cancel_script.pop(0), context)
        return inference_pb2.CancelGenerateResponse()

    def stop(self) -> None:
        self._released.set()
        self._server.stop(None).wait()

    @property
    def resumed(self) -> list[list[int]]:
        """The indices of each ResumeGenerate."""
        return [
            list(request.next_token_indices)
            for request in self.requests
            if isinstance(request, inference_pb2.ResumeGenerateRequest)
        ]

    def _next_call(self, request, context) -> ScriptedCall:
        with self._lock:
            self.requests.append(request)
            self.seconds_left.append(context.time_remaining())
            return self.script.pop(0) if self.script else ScriptedCall()

    def _messages(
        self, one: ScriptedCall, context, request_id: str, begins: Sequence[int]
    ) -> Iterator:
        message = inference_pb2.StreamGenerateResponse
        messages = [message(request_id=request_id)]
        for at in range(NUM_TOKENS):
            deltas = [_delta(c, at) for c, begin in enumerate(begins) if at >= begin]
            of_prompt = _PROMPT_LOGPROBS if at == begins[0] == 0 else ()
            if deltas:
                messages.append(
                    message(request_id=request_id, deltas=deltas, prompt_logprobs=of_prompt)
                )
        ends = [
            inference_pb2.ChoiceDelta(index=c, finish_reason=inference_pb2.FINISH_REASON_LENGTH)
            for c in range(len(begins))
        ]
        messages.extend(message(request_id=request_id, deltas=[end]) for end in ends)
        usage = inference_pb2.Usage(completion_tokens=len(begins) * NUM_TOKENS)
        messages.append(message(request_id=request_id, usage=usage))
        yield from messages[: one.after]
        self._end(one, context)

    def _end(self, one: ScriptedCall, context) -> None:
        if one.hang:
            self.hanging.set()
            context.add_callback(self._released.set)
            self._released.wait()
        if one.error is not None:
            status = status_pb2.Status(
                code=one.error.code.value[0],
                message=one.error.message,
                details=one.error.packed_details(),
            )
            context.abort_with_status(rpc_status.to_status(status))


# Of a prompt of two tokens.
_PROMPT_LOGPROBS = (
    inference_pb2.TokenLogprobs(),
    inference_pb2.TokenLogprobs(
        sampled=inference_pb2.TokenLogprob(token_id=5, logprob=-2, rank=3, text="five")
    ),
)


def _delta(choice: int, at: int) -> inference_pb2.ChoiceDelta:
    own = inference_pb2.TokenLogprob(
        token_id=100 * choice + at, logprob=-at, rank=choice + 1, text=f"{choice}{at} "
    )
    return inference_pb2.ChoiceDelta(
        index=choice,
        text=own.text,
        token_ids=[own.token_id],
        first_token_index=at,
        logprobs=[inference_pb2.TokenLogprobs(sampled=own)],
    )
