"""The served model and its tokenizer, as every public API offers them."""

from functools import partial
from typing import TypeVar

from gateway_svc.generation import validation
from gateway_svc.generation.checking import checked
from gateway_svc.scheduler.shards import Shards
from gateway_svc.text.model_files import ModelFiles
from gateway_svc.text.served_model import Model, ServedModel
from quire.service.channels import PUBLIC_MESSAGE_BYTES
from quire.service.errors import invalid
from quire.v1 import model_pb2, tokenizer_pb2

R = TypeVar("R", tokenizer_pb2.TokenizeResponse, tokenizer_pb2.DetokenizeResponse)


class TokenizationService:
    """Describes the model, and converts between text and tokens."""

    def __init__(self, served: ServedModel, scheduler: Shards) -> None:
        self._served = served
        self._scheduler = scheduler

    def model(self, name: str | None, field: str = "model") -> model_pb2.Model:
        """Describe the model. RequestError NOT_FOUND at `field` if it has another name."""
        model = self._served.get(name, field)
        limits = model.limits(self._scheduler.max_model_len)
        return model_pb2.Model(
            name=model.name,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            eos_token_ids=limits.eos_token_ids,
            has_chat_template=limits.has_chat_template,
        )

    async def tokenize(
        self, request: tokenizer_pb2.TokenizeRequest
    ) -> tokenizer_pb2.TokenizeResponse:
        model = self._model_of(request)
        limits = model.limits(self._scheduler.max_model_len)
        match request.WhichOneof("input"):
            case "text":
                text, rendered = request.text, None
                add_special_tokens = request.add_special_tokens or not request.HasField(
                    "add_special_tokens"
                )
                validation.check_text("text", text, limits)
            case "conversation":
                conversation = request.conversation
                check = partial(validation.check_conversation, conversation, limits)
                await checked(conversation, check)
                text = rendered = await model.render(conversation)
                validation.check_text("conversation", text, limits)
                add_special_tokens = False
            case _:
                raise invalid("text", "NO_INPUT", "is missing; set text or conversation")
        token_ids = await model.encode(text, add_special_tokens)
        return _check_size(
            request.WhichOneof("input") or "text",
            tokenizer_pb2.TokenizeResponse(token_ids=token_ids, rendered=rendered),
        )

    async def detokenize(
        self, request: tokenizer_pb2.DetokenizeRequest
    ) -> tokenizer_pb2.DetokenizeResponse:
        model = self._model_of(request)
        validation.check_detokenize(request.token_ids, model.limits(self._scheduler.max_model_len))
        skip = request.skip_special_tokens or not request.HasField("skip_special_tokens")
        text = await model.decode(request.token_ids, skip)
        return _check_size("token_ids", tokenizer_pb2.DetokenizeResponse(text=text))

    def files(self) -> ModelFiles:
        """What the gateway has read of the model."""
        return self._served.get(None).files

    def token_texts(self, token_ids: list[int]) -> list[str]:
        """The text of each token alone."""
        texts = self._served.get(None).token_texts
        return [texts[id_] for id_ in token_ids]

    def _model_of(
        self, request: tokenizer_pb2.TokenizeRequest | tokenizer_pb2.DetokenizeRequest
    ) -> Model:
        return self._served.get(request.model if request.HasField("model") else None)


def _check_size(field: str, response: R) -> R:
    """Return the response. RequestError at `field` if it exceeds the message limit."""
    num_bytes = response.ByteSize()
    if num_bytes > PUBLIC_MESSAGE_BYTES:
        raise invalid(
            field,
            "RESPONSE_TOO_LARGE",
            f"gives a response of {num_bytes} bytes; at most {PUBLIC_MESSAGE_BYTES} can be sent",
        )
    return response
