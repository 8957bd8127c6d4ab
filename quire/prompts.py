"""What is to be continued: a text, token ids or a conversation; one or many."""

from collections.abc import Mapping, Sequence

from typing_extensions import TypeIs

from quire.v1 import inference_pb2

# {"role": "user", "content": "Hello"}
Message = Mapping[str, str]
Conversation = Sequence[Message]
# A conversation is rendered with the model's chat template.
Prompt = str | Sequence[int] | Conversation

_MESSAGE_KEYS = {"role", "content"}


def is_one_prompt(prompts: object) -> TypeIs[Prompt]:
    """One prompt rather than a sequence of them."""
    return isinstance(prompts, str) or is_conversation(prompts) or _all_are(prompts, int)


def is_conversation(prompt: object) -> TypeIs[Conversation]:
    return _all_are(prompt, Mapping)


def conversation_proto(conversation: Conversation) -> inference_pb2.Conversation:
    """ValueError for a message that is not {"role": str, "content": str}."""
    return inference_pb2.Conversation(messages=[_message(m) for m in conversation])


def token_ids_proto(token_ids: Sequence[int]) -> inference_pb2.TokenIds:
    """TypeError or ValueError for what is no token id."""
    try:
        return inference_pb2.TokenIds(ids=token_ids)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"prompt: expected a text, token ids or a conversation, got {token_ids!r:.100}: {error}"
        ) from error


def _message(message: Message) -> inference_pb2.Message:
    if set(message) != _MESSAGE_KEYS or not all(isinstance(v, str) for v in message.values()):
        raise ValueError(
            f"messages: expected {{'role': text, 'content': text}}, got {message!r:.100}"
        )
    return inference_pb2.Message(role=message["role"], content=message["content"])


def _all_are(items: object, kind: type) -> bool:
    """A sequence with at least one item, all of them of this kind."""
    return (
        isinstance(items, Sequence) and len(items) > 0 and all(isinstance(i, kind) for i in items)
    )
