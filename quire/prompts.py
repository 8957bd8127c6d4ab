"""What is to be continued: a text, token ids or a conversation; one or many."""

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from typing_extensions import TypedDict, TypeIs

from quire.arguments import check_text, check_token_ids, wrong_type
from quire.v1 import inference_pb2

# {"role": "user", "content": "Hello"}
Message = Mapping[str, str]
Conversation = Sequence[Message]


class TextPrompt(TypedDict):
    """A text, as vLLM's users may write it."""

    prompt: str


class TokensPrompt(TypedDict):
    """Token ids, as vLLM's users may write them."""

    prompt_token_ids: Sequence[int]


# A conversation is rendered with the model's chat template.
Prompt: TypeAlias = str | Sequence[int] | Conversation | TextPrompt | TokensPrompt

_MESSAGE_KEYS = {"role", "content"}
_PROMPT_KEYS = ({"prompt"}, {"prompt_token_ids"})
_A_PROMPT = "a text, token ids or a conversation"
_A_CONVERSATION = "a conversation, a list of {'role': text, 'content': text}"


def each_prompt(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list. TypeError for what is neither."""
    if _is_one_prompt(prompts):
        return [prompts]
    if isinstance(prompts, bytes | bytearray | Mapping) or not isinstance(prompts, Iterable):
        raise wrong_type("prompts", f"{_A_PROMPT}, or a list of them", prompts)
    return list(prompts)


def each_conversation(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One conversation, or several, as a list. TypeError for what is neither."""
    if is_conversation(messages):
        return [messages]
    if not _all_are(messages, Sequence) or not all(map(is_conversation, messages)):
        raise wrong_type("messages", f"{_A_CONVERSATION}, or a list of them", messages)
    return list(messages)


def is_conversation(prompt: object) -> TypeIs[Conversation]:
    return (
        isinstance(prompt, Sequence)
        and _all_are(prompt, Mapping)
        and not any(map(_is_prompt_mapping, prompt))
    )


def fill_prompt(
    request: inference_pb2.GenerateRequest | inference_pb2.StreamGenerateRequest, prompt: Prompt
) -> None:
    """Writes the prompt into a request. TypeError or ValueError for what is none."""
    asked = _unwrapped(prompt)
    if isinstance(asked, str):
        check_text("prompt", asked)
        request.text = asked
    elif is_conversation(asked):
        request.conversation.CopyFrom(conversation_proto(asked))
    elif isinstance(asked, bytes | bytearray) or not isinstance(asked, Sequence):
        raise wrong_type("prompt", _A_PROMPT, asked)
    else:
        check_token_ids("prompt", asked)
        # An empty one is a prompt, too, and the server's to refuse.
        request.token_ids.CopyFrom(inference_pb2.TokenIds(ids=asked))


def conversation_proto(conversation: Conversation) -> inference_pb2.Conversation:
    """ValueError for a message that is not {"role": str, "content": str}."""
    return inference_pb2.Conversation(messages=[_message(m) for m in conversation])


def _message(message: Message) -> inference_pb2.Message:
    if set(message) != _MESSAGE_KEYS or not all(isinstance(v, str) for v in message.values()):
        raise ValueError(
            f"messages: expected {{'role': text, 'content': text}}, got {message!r:.100}"
        )
    for key, value in message.items():
        check_text(f"messages: {key}", value)
    return inference_pb2.Message(role=message["role"], content=message["content"])


def _is_one_prompt(prompts: object) -> TypeIs[Prompt]:
    return (
        isinstance(prompts, str)
        or is_conversation(prompts)
        or _is_prompt_mapping(prompts)
        or (not isinstance(prompts, bytes | bytearray) and _all_are(prompts, numbers.Integral))
    )


def _unwrapped(prompt: object) -> object:
    """What {"prompt": ...} or {"prompt_token_ids": ...} holds; anything else as it is."""
    if isinstance(prompt, Mapping) and _is_prompt_mapping(prompt):
        [prompt] = prompt.values()
    return prompt


def _is_prompt_mapping(prompt: object) -> bool:
    return isinstance(prompt, Mapping) and set(prompt) in _PROMPT_KEYS


def _all_are(items: object, kind: type) -> bool:
    """A sequence with at least one item, all of them of this kind."""
    return (
        isinstance(items, Sequence) and len(items) > 0 and all(isinstance(i, kind) for i in items)
    )
