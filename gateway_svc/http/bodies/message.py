"""The bodies of `POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's API."""

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway_svc.http.bodies.chat import MAX_MESSAGES, conversation
from gateway_svc.http.bodies.context_management import ContextManagement
from gateway_svc.http.bodies.fields import (
    Count,
    GenerationMessage,
    Hint,
    HttpRequest,
    JsonObject,
    message_type,
    unsupported,
)
from gateway_svc.http.bodies.fields import Texts as StopTexts
from gateway_svc.http.bodies.generation_fields import GenerationFields
from gateway_svc.http.bodies.message_input import InputMessage, Texts, messages_of
from gateway_svc.http.bodies.structured import JsonSchema, of_schema
from gateway_svc.http.bodies.tools import (
    MAX_TOOLS,
    ToolMode,
    schema_text,
    tool_choice,
    with_reasoning_effort,
)
from quire.service.errors import invalid
from quire.v1 import conversation_pb2, inference_pb2, tokenizer_pb2


class MessageTool(HttpRequest):
    """A function that the client runs. There are none of the server's."""

    # Before the others, so that an error names it first.
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    # The JSON Schema of its arguments.
    input_schema: JsonObject
    strict: bool | None = None
    cache_control: Hint | None = None
    # Arguments are always streamed as they are generated.
    eager_input_streaming: bool | None = None
    allowed_callers: unsupported(["direct"]) = None  # type: ignore[valid-type]
    defer_loading: unsupported(False) = None  # type: ignore[valid-type]
    input_examples: unsupported([]) = None  # type: ignore[valid-type]

    def to_proto(self) -> conversation_pb2.Tool:
        return conversation_pb2.Tool(
            name=self.name,
            description=self.description,
            parameters=schema_text(self.input_schema),
            strict=self.strict,
        )


class MessageToolChoice(HttpRequest):
    type: Literal["auto", "any", "tool", "none"]
    # Of the type `tool` alone.
    name: str | None = None
    # True: at most one call.
    disable_parallel_tool_use: bool | None = None

    def to_proto(self) -> conversation_pb2.ToolChoice | None:
        if (self.type == "tool") is (self.name is None):
            state = "is required" if self.name is None else "is accepted only"
            raise invalid("tool_choice.name", "INVALID_FIELD", f"{state} with the type tool")
        return tool_choice(_MODES.get(self.type), self.name)


_MODES: dict[str, ToolMode] = {"auto": "auto", "any": "required", "none": "none"}


class Thinking(HttpRequest):
    """Sets variables of the chat template."""

    type: Literal["enabled", "disabled", "adaptive"]
    # The model is not held to it: `max_tokens` is the limit of both, reasoning and text.
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None

    @property
    def variables(self) -> dict[str, Any]:
        is_on = self.type != "disabled"
        return {"enable_thinking": is_on, "thinking": is_on}


class JsonFormat(HttpRequest):
    type: Literal["json_schema"]
    schema_: Annotated[JsonSchema, Field(alias="schema")]


class OutputConfig(HttpRequest):
    # A variable of the chat template.
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None
    task_budget: unsupported() = None  # type: ignore[valid-type]


class CountTokensRequest(HttpRequest):
    """What a prompt is made of."""

    model: str | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Texts | None = None
    tools: Annotated[list[MessageTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # An older place of `output_config.format`.
    output_format: JsonFormat | None = None
    # Where a prefix to cache ends, labels, and tiers, which change nothing: every prefix is cached,
    # and all requests are served alike.
    cache_control: Hint | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    speed: Literal["standard", "fast"] | None = None
    # As vLLM has them.
    chat_template_kwargs: dict[str, Any] | None = None
    context_management: ContextManagement | None = None

    billing_policy: unsupported() = None  # type: ignore[valid-type]
    compaction: unsupported() = None  # type: ignore[valid-type]
    mcp_servers: unsupported([]) = None  # type: ignore[valid-type]

    def to_tokenize(self) -> tokenizer_pb2.TokenizeRequest:
        """A conversation may end anywhere, also with a call that has no result yet."""
        converted = self._conversation()
        last = converted.messages[-1]
        if last.role == "assistant":
            if last.tool_calls or not last.content.strip():
                converted.add_generation_prompt = False
            else:
                converted.continue_final_message = True
        return tokenizer_pb2.TokenizeRequest(model=self.model, conversation=converted)

    def _conversation(self) -> conversation_pb2.Conversation:
        messages = messages_of(self.messages, self.system)
        if self.context_management is not None:
            self.context_management.apply(messages)
        return conversation(
            messages,
            None,
            self._variables(),
            tools=[tool.to_proto() for tool in self.tools or ()],
            tool_choice=None if self.tool_choice is None else self.tool_choice.to_proto(),
            parallel_tool_calls=False if self._wants_one_call else None,
            include_reasoning=False if self._hides_thinking else None,
        )

    @property
    def _wants_one_call(self) -> bool:
        return self.tool_choice is not None and bool(self.tool_choice.disable_parallel_tool_use)

    @property
    def _hides_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"

    def _variables(self) -> dict[str, Any] | None:
        given = {} if self.thinking is None else self.thinking.variables
        given |= self.chat_template_kwargs or {}
        effort = None if self.output_config is None else self.output_config.effort
        return with_reasoning_effort(given, effort)


class MessageRequest(CountTokensRequest, GenerationFields):
    max_tokens: Count
    stop_sequences: StopTexts | None = None
    # These change nothing, too.
    metadata: Hint | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: str | None = None

    # Quire's: seconds for which the request continues after its client has disconnected.
    resume_window_s: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = None

    container: unsupported() = None  # type: ignore[valid-type]
    diagnostics: unsupported() = None  # type: ignore[valid-type]
    fallback_credit_token: unsupported() = None  # type: ignore[valid-type]
    fallbacks: unsupported([]) = None  # type: ignore[valid-type]
    thread: unsupported() = None  # type: ignore[valid-type]

    @property
    def format_field(self) -> str:
        """The field that has the format, if there is one."""
        return "output_config" if self.output_format is None else "output_format"

    def message(self, request_id: str) -> GenerationMessage:
        params = inference_pb2.SamplingParams(
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
        )
        if (form := self._format()) is not None:
            params.structured_output.CopyFrom(of_schema(form.schema_))
        self.fill_params(params)
        converted = self._conversation()
        if _is_continued(converted.messages[-1]):
            converted.continue_final_message = True
        return message_type(bool(self.stream))(
            request_id=request_id,
            model=self.model,
            conversation=converted,
            sampling_params=params,
            cache_salt=self.cache_salt,
            priority=self.priority,
            resume_window_s=self.resume_window_s,
        )

    def _format(self) -> JsonFormat | None:
        form = None if self.output_config is None else self.output_config.format
        if form is not None and self.output_format is not None:
            raise invalid(
                "output_format", "TWO_FORMATS", "is set together with output_config.format"
            )
        return form or self.output_format


def _is_continued(last: conversation_pb2.Message) -> bool:
    """Whether the output continues the last message, which is the assistant's then."""
    if last.role != "assistant":
        return False
    if last.tool_calls or not last.content.strip():
        found = "tool_use without its result" if last.tool_calls else "no text to continue"
        raise invalid(
            "messages",
            "NOTHING_TO_CONTINUE",
            f"ends with a message of the assistant that has {found}; add a message of the user",
        )
    return True
