"""The body of `POST /v1/responses`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway_svc.http.bodies.chat import MAX_MESSAGES, conversation
from gateway_svc.http.bodies.fields import (
    CacheRetention,
    Count,
    GenerationMessage,
    Hint,
    HttpRequest,
    ServiceTier,
    Verbosity,
    message_type,
    replaced_by,
    unsupported,
)
from gateway_svc.http.bodies.generation_fields import GenerationFields
from gateway_svc.http.bodies.response_input import (
    InputItem,
    NamedResponseTool,
    ReasoningConfig,
    ResponseTool,
    joined,
    messages_of,
)
from gateway_svc.http.bodies.structured import TextFormat
from gateway_svc.http.bodies.tools import (
    MAX_TOOLS,
    ToolMode,
    tool_choice,
    with_reasoning_effort,
)
from quire.v1 import conversation_pb2, inference_pb2

_LOGPROBS = "message.output_text.logprobs"
# Clients that send whole conversations ask for encrypted reasoning. It changes nothing: reasoning
# is returned as text, which they can send back.
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class TextConfig(HttpRequest):
    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ResponseRequest(GenerationFields):
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    # Runs without a client; the response is retrieved by its id.
    background: bool | None = None
    # Responses are kept for minutes either way, as all requests are.
    store: bool | None = None
    max_output_tokens: Count | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = None
    include: list[Included] | None = None
    text: TextConfig | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolMode | NamedResponseTool | None = None
    # False: at most one call.
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    # Labels of the client's, which change nothing.
    metadata: dict[str, str] | None = None
    # Those that Codex sends.
    client_metadata: Hint | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Hint | None = None
    prompt_cache_retention: CacheRetention | None = None
    service_tier: ServiceTier | None = None
    # `auto` leaves out the first exchanges of an input that is too long.
    truncation: Literal["auto", "disabled"] | None = None
    # Of tools that the server runs, of which there are none.
    max_tool_calls: Count | None = None

    # As vLLM has it.
    chat_template_kwargs: dict[str, Any] | None = None

    access_programs: unsupported() = None  # type: ignore[valid-type]
    background_options: unsupported() = None  # type: ignore[valid-type]
    context_management: unsupported([]) = None  # type: ignore[valid-type]
    conversation: unsupported() = None  # type: ignore[valid-type]
    image: unsupported() = None  # type: ignore[valid-type]
    moderation: unsupported() = None  # type: ignore[valid-type]
    previous_response_id: replaced_by("input with the earlier items") = None  # type: ignore[valid-type]
    prompt: unsupported() = None  # type: ignore[valid-type]
    stream_options: unsupported({"include_obfuscation": False}) = None  # type: ignore[valid-type]

    @property
    def text_format(self) -> TextFormat | None:
        return None if self.text is None else self.text.format

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def message(self, request_id: str) -> GenerationMessage:
        params = inference_pb2.SamplingParams(
            max_tokens=self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            structured_output=None if self.text_format is None else self.text_format.to_proto(),
        )
        self.fill_params(params)
        # Only the updates of a stream begin with the acceptance.
        return message_type(bool(self.stream or self.background))(
            request_id=request_id,
            model=self.model,
            conversation=self._conversation(),
            sampling_params=params,
            cache_salt=self.cache_salt,
            priority=self.priority,
        )

    def _conversation(self) -> conversation_pb2.Conversation:
        effort = None if self.reasoning is None else self.reasoning.effort
        name = self.tool_choice.name if isinstance(self.tool_choice, NamedResponseTool) else None
        mode = None if isinstance(self.tool_choice, NamedResponseTool) else self.tool_choice
        return conversation(
            self._messages(),
            None,
            with_reasoning_effort(self.chat_template_kwargs, effort),
            tools=[tool.to_proto() for tool in self.tools or ()],
            tool_choice=tool_choice(mode, name),
            parallel_tool_calls=self.parallel_tool_calls,
        )

    def _messages(self) -> list[conversation_pb2.Message]:
        messages = []
        if self.instructions is not None:
            messages.append(conversation_pb2.Message(role="system", content=self.instructions))
        if isinstance(self.input, str):
            return [*messages, conversation_pb2.Message(role="user", content=self.input)]
        return joined(messages + messages_of(self.input))

    def _format(self) -> dict[str, Any]:
        if self.text_format is None:
            return {"type": "text"}
        return self.text_format.model_dump(by_alias=True, exclude_none=True)

    def _shown_tool_choice(self) -> str | dict[str, Any]:
        if isinstance(self.tool_choice, NamedResponseTool):
            return self.tool_choice.model_dump()
        return self.tool_choice or "auto"

    def response(self, model: str) -> dict[str, Any]:
        """The fields of the response object that the request determines."""
        return {
            "object": "response",
            "model": model,
            "background": bool(self.background),
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {
                "effort": None if self.reasoning is None else self.reasoning.effort,
                "summary": None,
            },
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": self.store is not False,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": self._format()},
            "tool_choice": self._shown_tool_choice(),
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }
