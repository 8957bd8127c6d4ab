"""`TokenizerService`: the served model's tokenizer."""

from gateway_svc import prompts, validation
from gateway_svc.rpc import Calls, Context
from gateway_svc.scheduler_link import SchedulerLink
from gateway_svc.served_model import ServedModel
from quire.service.errors import invalid
from quire.v1 import tokenizer_pb2, tokenizer_pb2_grpc


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
            validation.check_token_ids("token_ids", request.token_ids, model.files.vocab_size)
            skip = request.skip_special_tokens or not request.HasField("skip_special_tokens")
            return tokenizer_pb2.DetokenizeResponse(
                text=await model.decode(request.token_ids, skip)
            )
        raise AssertionError("answering ends the call")

    async def _tokenize(
        self, request: tokenizer_pb2.TokenizeRequest
    ) -> tokenizer_pb2.TokenizeResponse:
        model = self._served.named(request.model if request.HasField("model") else None)
        limits = model.limits(self._link.max_model_len)
        match request.WhichOneof("input"):
            case "text":
                text, rendered, add_special_tokens = request.text, None, True
                validation.check_text("text", text, limits)
            case "conversation":
                validation.check_conversation("conversation", request.conversation, limits)
                text = rendered = await prompts.render("conversation", request.conversation, model)
                add_special_tokens = False
            case _:
                raise invalid("input", "NO_INPUT", "is missing; text or conversation")
        if request.HasField("add_special_tokens"):
            add_special_tokens = request.add_special_tokens
        token_ids = await model.encode(text, add_special_tokens)
        return tokenizer_pb2.TokenizeResponse(token_ids=token_ids, rendered=rendered)
