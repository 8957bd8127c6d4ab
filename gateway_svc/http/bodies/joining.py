"""Joins adjacent messages of a conversation: many chat templates refuse two of one role."""

from collections.abc import Callable, Iterable, Sequence

from quire.v1 import conversation_pb2

Message = conversation_pb2.Message


def join_adjacent(
    messages: Iterable[Message], is_continued: Callable[[Message, Message], bool]
) -> list[Message]:
    """Join each run of messages of which every one is continued by the next. Texts are separated
    by line feeds, and copied once however long the run is."""
    runs: list[list[Message]] = []
    for message in messages:
        if runs and is_continued(runs[-1][-1], message):
            runs[-1].append(message)
        else:
            runs.append([message])
    return [run[0] if len(run) == 1 else _joined(run) for run in runs]


def _joined(run: Sequence[Message]) -> Message:
    """One message of the first one's role, with the texts and the calls of all."""
    joined = Message(
        role=run[0].role,
        content="\n".join(message.content for message in run if message.content),
        tool_calls=[call for message in run for call in message.tool_calls],
    )
    if any(message.HasField("reasoning") for message in run):
        joined.reasoning = "\n".join(message.reasoning for message in run if message.reasoning)
    return joined
