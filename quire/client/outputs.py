"""Outputs of requests, named as in vLLM."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from quire.client.conversations import ToolCall
from quire.v1 import inference_pb2, model_pb2

FinishReason = Literal["stop", "length", "tool_calls"]

_FINISH_REASONS: dict[int, FinishReason] = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


@dataclass(frozen=True)
class Usage:
    """Token counts of one request."""

    # Counted once, for any number of completions.
    prompt_tokens: int
    # Prompt tokens found in the prefix cache.
    cached_prompt_tokens: int
    # The sum over all completions.
    completion_tokens: int
    # Completion tokens that are reasoning.
    reasoning_tokens: int = 0

    @classmethod
    def from_proto(cls, usage: inference_pb2.Usage) -> "Usage":
        return cls(
            usage.prompt_tokens,
            usage.cached_prompt_tokens,
            usage.completion_tokens,
            usage.reasoning_tokens,
        )


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability in the model's distribution before temperature and filters, or
    after penalties, biases and masks with `logprobs_mode` "processed"."""

    # Natural logarithm of the probability.
    logprob: float
    # Rank by probability; 1 is the most likely token.
    rank: int
    # The text of the token alone; incomplete characters become U+FFFD.
    decoded_token: str


# By token id: the sampled token, or that of the prompt, first, then the other most likely tokens in
# order of rank.
TokenLogprobs: TypeAlias = dict[int, Logprob]


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    # All sampled tokens, including a final stop token.
    token_ids: list[int]
    finish_reason: FinishReason | None
    # The stop string or the stop token's id, if finish_reason is "stop".
    stop_reason: str | int | None
    # One per entry of token_ids; empty unless `SamplingParams.logprobs` is set.
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    # The reasoning before the text, if the model's output separates it.
    reasoning: str = ""
    # Calls in the output; they are not part of the text.
    tool_calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def from_proto(cls, choice: inference_pb2.Choice) -> "CompletionOutput":
        return cls(
            index=choice.index,
            text=choice.text,
            token_ids=list(choice.token_ids),
            finish_reason=_FINISH_REASONS.get(choice.finish_reason),
            stop_reason=_stop_reason(choice),
            logprobs=_logprobs(choice.logprobs),
            reasoning=choice.reasoning,
            tool_calls=[ToolCall.from_proto(call) for call in choice.tool_calls],
        )


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its `SamplingParams.n` completions."""

    request_id: str
    model: str
    # The caller's prompt, if it is a text.
    prompt: str | None
    # The tokens of the prompt that were used; None if an older server does not return them.
    prompt_token_ids: list[int] | None
    # In order of their indices.
    outputs: list[CompletionOutput]
    usage: Usage
    # One per token of the prompt; the first one is None. None unless
    # `SamplingParams.prompt_logprobs` is set.
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        """The text of the first completion."""
        return self.outputs[0].text


@dataclass(frozen=True)
class BeamSearchSequence:
    """One continuation of a prompt."""

    text: str
    # With a final stop token.
    token_ids: list[int]
    finish_reason: FinishReason
    # The stop token's id, if finish_reason is "stop".
    stop_reason: int | None
    # The sum of the tokens' log-probabilities.
    cum_logprob: float
    # The same, divided by a power of the number of tokens.
    score: float


@dataclass(frozen=True)
class BeamSearchOutput:
    """A prompt and its most likely continuations."""

    request_id: str
    model: str
    # The caller's prompt, if it is a text.
    prompt: str | None
    prompt_token_ids: list[int]
    # Highest score first.
    sequences: list[BeamSearchSequence]
    usage: Usage


@dataclass(frozen=True)
class ToolCallDelta:
    """New output of one tool call."""

    # Calls of a completion are numbered from 0.
    index: int
    # Set in the first delta of the call, as is the name.
    id: str | None
    name: str | None
    # The next part of the arguments.
    arguments: str

    @classmethod
    def from_proto(cls, delta: inference_pb2.ToolCallDelta) -> "ToolCallDelta":
        return cls(
            delta.index,
            delta.id if delta.HasField("id") else None,
            delta.name if delta.HasField("name") else None,
            delta.arguments,
        )


@dataclass(frozen=True)
class CompletionDelta:
    """The part of a completion in one message of a stream."""

    index: int
    text: str
    # Position of token_ids[0] within the completion.
    first_token_index: int
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    # One per entry of token_ids; empty unless `SamplingParams.logprobs` is set.
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    # New reasoning, which precedes the text.
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    @classmethod
    def from_proto(cls, delta: inference_pb2.ChoiceDelta) -> "CompletionDelta":
        return cls(
            index=delta.index,
            text=delta.text,
            first_token_index=delta.first_token_index,
            token_ids=list(delta.token_ids),
            finish_reason=_FINISH_REASONS.get(delta.finish_reason),
            stop_reason=_stop_reason(delta),
            logprobs=_logprobs(delta.logprobs),
            reasoning=delta.reasoning,
            tool_calls=[ToolCallDelta.from_proto(call) for call in delta.tool_calls],
        )


@dataclass(frozen=True)
class RequestDelta:
    """A message of a stream. The first one has no outputs; it means that the request is accepted.

    Completions are generated concurrently: `outputs` has an entry for each completion that the
    message extends. The last entry of a completion has its finish_reason.
    """

    request_id: str
    model: str
    outputs: list[CompletionDelta]
    # In the last message only.
    usage: Usage | None
    # As in `RequestOutput`, in the message with the first token of completion 0; otherwise None.
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        """The message's text of the first completion."""
        return "".join(output.text for output in self.outputs if output.index == 0)

    @classmethod
    def from_proto(
        cls, message: inference_pb2.StreamGenerateResponse | inference_pb2.ResumeGenerateResponse
    ) -> "RequestDelta":
        return cls(
            request_id=message.request_id,
            model=message.model,
            outputs=[CompletionDelta.from_proto(delta) for delta in message.deltas],
            usage=Usage.from_proto(message.usage) if message.HasField("usage") else None,
            prompt_logprobs=prompt_logprobs_from(message.prompt_logprobs),
        )


@dataclass(frozen=True)
class Model:
    """A served model."""

    name: str
    # Most tokens of prompt and output together.
    max_model_len: int
    # Token ids are below this.
    vocab_size: int
    eos_token_ids: list[int]
    has_chat_template: bool

    @classmethod
    def from_proto(cls, model: model_pb2.Model) -> "Model":
        return cls(
            name=model.name,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=list(model.eos_token_ids),
            has_chat_template=model.has_chat_template,
        )


def prompt_logprobs_from(
    messages: Sequence[inference_pb2.TokenLogprobs],
) -> list[TokenLogprobs | None] | None:
    """None if there are no messages."""
    return [None, *_logprobs(messages[1:])] if messages else None


def _logprobs(messages: Iterable[inference_pb2.TokenLogprobs]) -> list[TokenLogprobs]:
    return [
        {
            entry.token_id: Logprob(entry.logprob, entry.rank, entry.text)
            for entry in (one.sampled, *one.top)
        }
        for one in messages
    ]


def _stop_reason(choice: inference_pb2.Choice | inference_pb2.ChoiceDelta) -> str | int | None:
    match choice.WhichOneof("stopped_by"):
        case "stop_string":
            return choice.stop_string
        case "stop_token_id":
            return choice.stop_token_id
        case _:
            return None
