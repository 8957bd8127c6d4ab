"""Truncation of prompts to their last tokens, of conversations to their last exchanges. Pure."""

from quire.v1 import conversation_pb2, inference_pb2

# Their messages are no part of an exchange.
_SYSTEM = ("system", "developer")


def num_kept_tokens(
    num_tokens: int, params: inference_pb2.SamplingParams, max_model_len: int
) -> int:
    """How many of a prompt's tokens are kept."""
    if not params.HasField("truncate_prompt_tokens"):
        return num_tokens
    kept = params.truncate_prompt_tokens
    if kept >= max_model_len:
        num_output_tokens = params.max_tokens if params.HasField("max_tokens") else 1
        kept = max(1, max_model_len - num_output_tokens)
    return min(num_tokens, kept)


def num_fitting_tokens(params: inference_pb2.SamplingParams, max_model_len: int) -> int:
    """How many tokens a conversation that is cut may have: as many as leave room for the output,
    but half of the context in any case."""
    num_output_tokens = params.max_tokens if params.HasField("max_tokens") else 1
    return max_model_len - min(num_output_tokens, max_model_len // 2)


def exchange_starts(conversation: conversation_pb2.Conversation) -> list[int]:
    """The messages with which exchanges begin: those of users. Earlier ones belong to the first."""
    roles = [message.role for message in conversation.messages]
    starts = [at for at, role in enumerate(roles) if role == "user"]
    return [0, *starts[1:]]


def from_exchange(
    conversation: conversation_pb2.Conversation, start: int
) -> conversation_pb2.Conversation:
    """The conversation without the exchanges before the one that begins at `start`."""
    kept = conversation_pb2.Conversation()
    kept.CopyFrom(conversation)
    del kept.messages[:]
    kept.messages.extend(
        message
        for at, message in enumerate(conversation.messages)
        if at >= start or message.role in _SYSTEM
    )
    return kept
