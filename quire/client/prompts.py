"""Prompts: texts, token ids and conversations."""

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from typing_extensions import TypedDict, TypeIs

from quire.client.arguments import check_text, check_token_ids, wrong_type
from quire.client.conversations import Conversation, conversation_proto
from quire.v1 import inference_pb2


class TextPrompt(TypedDict):
    """A text prompt, as in vLLM."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt of token ids, as in vLLM."""

    prompt_token_ids: Sequence[int]


# A conversation is rendered with the model's chat template.
Prompt: TypeAlias = str | Sequence[int] | Conversation | TextPrompt | TokensPrompt

_PROMPT_KEYS = ({"prompt"}, {"prompt_token_ids"})
_A_PROMPT = "a text, token ids or a conversation"
_A_CONVERSATION = "a conversation, a list of {'role': text, 'content': text}"


def each_prompt(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Return one or several prompts as a list. TypeError for other values."""
    if _is_one_prompt(prompts):
        return [prompts]
    if isinstance(prompts, bytes | bytearray | Mapping) or not isinstance(prompts, Iterable):
        raise wrong_type("prompts", f"{_A_PROMPT}, or a list of them", prompts)
    return list(prompts)


def several_prompts(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Return prompts as a list. TypeError for other values, such as one text."""
    if isinstance(prompts, str | bytes | bytearray | Mapping) or not isinstance(prompts, Iterable):
        raise wrong_type("prompts", "a list of prompts", prompts)
    return list(prompts)


def each_conversation(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Return one or several conversations as a list. TypeError for other values."""
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
    """Set a request's prompt. TypeError or ValueError for an invalid one."""
    content: object = prompt
    if isinstance(prompt, Mapping) and _is_prompt_mapping(prompt):
        [content] = prompt.values()
    if isinstance(content, str):
        check_text("prompt", content)
        request.text = content
    elif is_conversation(content):
        request.conversation.CopyFrom(conversation_proto(content))
    elif isinstance(content, bytes | bytearray) or not isinstance(content, Sequence):
        raise wrong_type("prompt", _A_PROMPT, content)
    else:
        check_token_ids("prompt", content)
        # An empty list is sent as well, and refused by the server.
        request.token_ids.CopyFrom(inference_pb2.TokenIds(ids=content))


def _is_one_prompt(prompts: object) -> TypeIs[Prompt]:
    return (
        isinstance(prompts, str)
        or is_conversation(prompts)
        or _is_prompt_mapping(prompts)
        or (not isinstance(prompts, bytes | bytearray) and _all_are(prompts, numbers.Integral))
    )


def _is_prompt_mapping(prompt: object) -> bool:
    return isinstance(prompt, Mapping) and set(prompt) in _PROMPT_KEYS


def _all_are(items: object, kind: type) -> bool:
    """Whether a value is a non-empty sequence of items of this type."""
    return (
        isinstance(items, Sequence) and len(items) > 0 and all(isinstance(i, kind) for i in items)
    )
