"""The bodies of `POST /tokenize` and `POST /detokenize`, as vLLM has them."""

from typing import Annotated, Any

from pydantic import Field

from gateway_svc.http.bodies.chat import (
    MAX_MESSAGES,
    ChatMessage,
    Documents,
    conversation,
    documents_of,
)
from gateway_svc.http.bodies.fields import HttpRequest, TokenIds, unsupported
from gateway_svc.http.bodies.tools import ChatTools
from quire.service.errors import invalid
from quire.v1 import tokenizer_pb2


class TokenizeRequest(HttpRequest):
    model: str | None = None
    # Either a prompt or messages.
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = (
        None
    )
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Adds the text of each token.
    return_token_strs: bool | None = None
    continue_final_message: bool | None = None
    chat_template: unsupported() = None  # type: ignore[valid-type]
    tools: ChatTools | None = None
    documents: Documents | None = None

    def message(self) -> tokenizer_pb2.TokenizeRequest:
        """RequestError unless exactly one of the two inputs is set."""
        if (self.messages is None) is (self.prompt is None):
            state = "is missing" if self.prompt is None else "is set together with messages"
            raise invalid("prompt", "NO_INPUT", f"{state}; set either prompt or messages")
        message = tokenizer_pb2.TokenizeRequest(
            model=self.model, add_special_tokens=self.add_special_tokens
        )
        if self.messages is not None:
            message.conversation.CopyFrom(
                conversation(
                    [one.to_proto() for one in self.messages],
                    self.add_generation_prompt,
                    self.chat_template_kwargs,
                    tools=[tool.function.to_proto() for tool in self.tools or ()],
                    documents=documents_of(self.documents),
                    continue_final_message=self.continue_final_message,
                )
            )
        elif self.prompt is not None:
            message.text = self.prompt
        return message


class DetokenizeRequest(HttpRequest):
    model: str | None = None
    tokens: TokenIds
    # They are kept by default, as in vLLM; over gRPC they are left out.
    skip_special_tokens: bool | None = None

    def message(self) -> tokenizer_pb2.DetokenizeRequest:
        return tokenizer_pb2.DetokenizeRequest(
            model=self.model,
            token_ids=self.tokens,
            skip_special_tokens=bool(self.skip_special_tokens),
        )
