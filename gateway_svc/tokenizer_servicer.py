"""`TokenizerService`: the served model's tokenizer."""

from typing import TypeVar

from gateway_svc import prompts, validation
from gateway_svc.rpc import Calls, Context
from gateway_svc.scheduler_link import SchedulerLink
from gateway_svc.served_model import ServedModel
from quire.service.channels import PUBLIC_MESSAGE_BYTES
from quire.service.errors import invalid
from quire.v1 import tokenizer_pb2, tokenizer_pb2_grpc

R = TypeVar("R", tokenizer_pb2.TokenizeResponse, tokenizer_pb2.DetokenizeResponse)


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    def __init__(self, served: ServedModel, link: SchedulerLink, calls: Calls) -> None:
        self._served = served
        self._link = link
        self._calls = calls

    async def Tokenize(  # noqa: N802
        self, request: tokenizer_pb2.TokenizeRequest, context: Context
    ) -> tokenizer_pb2.TokenizeResponse:
        async with self._calls.answering(context):
            return await self._tokenize(request)
        raise AssertionError("answering ends the call")

    async def Detokenize(  # noqa: N802
        self, request: tokenizer_pb2.DetokenizeRequest, context: Context
    ) -> tokenizer_pb2.DetokenizeResponse:
        async with self._calls.answering(context):
            model = self._served.named(request.model if request.HasField("model") else None)
            limits = model.limits(self._link.max_model_len)
            validation.check_detokenized(request.token_ids, limits)
            skip = request.skip_special_tokens or not request.HasField("skip_special_tokens")
            text = await model.decode(request.token_ids, skip)
            return _sendable("token_ids", tokenizer_pb2.DetokenizeResponse(text=text))
        raise AssertionError("answering ends the call")

    async def _tokenize(
        self, request: tokenizer_pb2.TokenizeRequest
    ) -> tokenizer_pb2.TokenizeResponse:
        model = self._served.named(request.model if request.HasField("model") else None)
        limits = model.limits(self._link.max_model_len)
        match request.WhichOneof("input"):
            case "text":
                text, rendered = request.text, None
                add_special_tokens = request.add_special_tokens or not request.HasField(
                    "add_special_tokens"
                )
                validation.check_text("text", text, limits)
            case "conversation":
                validation.check_conversation("conversation", request.conversation, limits)
                text = rendered = await prompts.render("conversation", request.conversation, model)
                add_special_tokens = False
            case _:
                raise invalid("input", "NO_INPUT", "is missing; text or conversation")
        token_ids = await model.encode(text, add_special_tokens)
        return _sendable(
            "input", tokenizer_pb2.TokenizeResponse(token_ids=token_ids, rendered=rendered)
        )


def _sendable(field: str, response: R) -> R:
    """RequestError if the answer to `field` is beyond what a message may be."""
    num_bytes = response.ByteSize()
    if num_bytes > PUBLIC_MESSAGE_BYTES:
        raise invalid(
            field,
            "RESPONSE_TOO_LARGE",
            f"gives an answer of {num_bytes} bytes; at most {PUBLIC_MESSAGE_BYTES} can be sent",
        )
    return response
