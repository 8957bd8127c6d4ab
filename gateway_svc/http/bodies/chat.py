"""The body of `POST /v1/chat/completions`."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from gateway_svc.http.bodies.fields import (
    CacheRetention,
    Count,
    GenerationMessage,
    Hint,
    HttpRequest,
    ServiceTier,
    Verbosity,
    message_type,
    struct_of,
    unsupported,
)
from gateway_svc.http.bodies.sampling import SamplingFields
from gateway_svc.http.bodies.thinking import RedactedThinkingBlock, ThinkingBlock, reasoning_of
from gateway_svc.http.bodies.tools import (
    ChatToolCalls,
    ChatTools,
    NamedTool,
    ReasoningEffort,
    ToolMode,
    tool_choice,
    with_reasoning_effort,
)
from quire.service.errors import invalid
from quire.v1 import conversation_pb2

MAX_MESSAGES = 4096


class TextPart(HttpRequest):
    """A text of a message's content."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    # Of output that a client sends back.
    annotations: unsupported([]) = None  # type: ignore[valid-type]
    logprobs: unsupported([]) = None  # type: ignore[valid-type]
    # Where a prefix to cache ends, in Anthropic's and in OpenAI's form.
    cache_control: Hint | None = None
    prompt_cache_breakpoint: Hint | None = None


# Only texts are served, and the reasoning of the assistant's own messages.
Part = TextPart | ThinkingBlock | RedactedThinkingBlock
Content = str | Annotated[list[Part], Field(max_length=MAX_MESSAGES)]
ThinkingBlocks = Annotated[
    list[ThinkingBlock | RedactedThinkingBlock], Field(max_length=MAX_MESSAGES)
]
# Texts by name, such as a title and a text.
Documents = Annotated[list[dict[str, str]], Field(max_length=1024)]


def _check_parts(content: Content | None, info: ValidationInfo) -> Content | None:
    if isinstance(content, list) and info.data.get("role") != "assistant":
        for part in content:
            if not isinstance(part, TextPart):
                message = "has a part of the type {type}, which is for the role assistant alone"
                raise PydanticCustomError("part_of_role", message, {"type": part.type})
    return content


class ChatMessage(HttpRequest):
    role: Annotated[str, Field(min_length=1)]
    content: Annotated[Content | None, AfterValidator(_check_parts)] = None
    # The call that a message of the role `tool` has the output of.
    tool_call_id: str | None = None
    name: str | None = None
    tool_calls: ChatToolCalls | None = None
    reasoning: str | None = None
    # vLLM's older name.
    reasoning_content: str | None = None
    # litellm's, which is the reasoning of messages without the others.
    thinking_blocks: ThinkingBlocks | None = None
    function_call: unsupported() = None  # type: ignore[valid-type]
    audio: unsupported() = None  # type: ignore[valid-type]
    refusal: unsupported() = None  # type: ignore[valid-type]
    # Of output that a client sends back.
    annotations: unsupported([]) = None  # type: ignore[valid-type]
    # litellm's copy of the output's fields that it does not know; it changes nothing.
    provider_specific_fields: dict[str, Any] | None = None
    # Of OpenAI's client for Python: the content once more, as an object.
    parsed: Any = None
    cache_control: Hint | None = None

    def to_proto(self) -> conversation_pb2.Message:
        return conversation_pb2.Message(
            role=self.role,
            content=text_of(self.content),
            tool_calls=[call.to_proto() for call in self.tool_calls or ()],
            tool_call_id=self.tool_call_id,
            name=self.name,
            reasoning=self._reasoning(),
        )

    def _reasoning(self) -> str | None:
        for given in (self.reasoning, self.reasoning_content):
            if given is not None:
                return given
        parts = self.content if isinstance(self.content, list) else ()
        return reasoning_of([*parts]) or reasoning_of(self.thinking_blocks or ())


class ChatRequest(SamplingFields):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = None
    # Labels of the client's, which change nothing.
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Hint | None = None
    prompt_cache_retention: CacheRetention | None = None
    service_tier: ServiceTier | None = None
    # Completions are not kept for later retrieval either way.
    store: bool | None = None
    # A text that the output is likely to have.
    prediction: Hint | None = None
    verbosity: Verbosity | None = None

    # As vLLM has them.
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: unsupported(False) = None  # type: ignore[valid-type]
    chat_template: unsupported() = None  # type: ignore[valid-type]
    documents: Documents | None = None
    echo: unsupported(False) = None  # type: ignore[valid-type]

    tools: ChatTools | None = None
    tool_choice: ToolMode | NamedTool | None = None
    # False: at most one call.
    parallel_tool_calls: bool | None = None
    # Sets variables of the chat template.
    reasoning_effort: ReasoningEffort | None = None
    # False leaves the reasoning out of the output.
    include_reasoning: bool | None = None
    functions: unsupported([]) = None  # type: ignore[valid-type]
    function_call: unsupported("none", "auto") = None  # type: ignore[valid-type]
    audio: unsupported() = None  # type: ignore[valid-type]
    modalities: unsupported(["text"]) = None  # type: ignore[valid-type]
    moderation: unsupported() = None  # type: ignore[valid-type]
    web_search_options: unsupported() = None  # type: ignore[valid-type]

    def message(self, request_id: str) -> GenerationMessage:
        params = self.sampling_params()
        if self.max_completion_tokens is not None:
            params.max_tokens = self.max_completion_tokens
        if self.logprobs:
            params.logprobs = self.top_logprobs or 0
        elif self.top_logprobs:
            raise invalid("top_logprobs", "NO_LOGPROBS", "is accepted only with logprobs = true")
        return message_type(bool(self.stream))(
            request_id=request_id,
            model=self.model,
            conversation=conversation(
                [message.to_proto() for message in self.messages],
                self.add_generation_prompt,
                with_reasoning_effort(self.chat_template_kwargs, self.reasoning_effort),
                tools=[tool.function.to_proto() for tool in self.tools or ()],
                documents=documents_of(self.documents),
                tool_choice=self._tool_choice(),
                parallel_tool_calls=self.parallel_tool_calls,
                include_reasoning=self.include_reasoning,
                continue_final_message=self.continue_final_message,
            ),
            sampling_params=params,
            cache_salt=self.cache_salt,
            priority=self.priority,
            resume_window_s=self.resume_window_s,
        )

    def _tool_choice(self) -> conversation_pb2.ToolChoice | None:
        if isinstance(self.tool_choice, NamedTool):
            return tool_choice(None, self.tool_choice.function.name)
        return tool_choice(self.tool_choice, None)


def text_of(content: str | Sequence[Part] | None) -> str:
    """The text of a message's content; its parts are separated by line feeds, as in vLLM."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content if isinstance(part, TextPart))


def documents_of(documents: Documents | None) -> list[conversation_pb2.Document]:
    return [
        conversation_pb2.Document(
            fields=[
                conversation_pb2.DocumentField(name=name, text=text) for name, text in one.items()
            ]
        )
        for one in documents or ()
    ]


def conversation(
    messages: list[conversation_pb2.Message],
    add_generation_prompt: bool | None = None,
    variables: dict[str, Any] | None = None,
    **fields: Any,
) -> conversation_pb2.Conversation:
    return conversation_pb2.Conversation(
        messages=messages,
        add_generation_prompt=add_generation_prompt,
        chat_template_kwargs=struct_of("chat_template_kwargs", variables),
        **fields,
    )
