"""Tokens of requests with an interval are sent in batches, all other tokens at once."""

import struct
from array import array
from dataclasses import dataclass, field

from bare_groups import bare_group
from grpc import StatusCode
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.internal.v1 import scheduler_pb2
from quire.service.errors import failed
from scheduler_svc.core.logprobs import ENTRY_BYTES, MAX_NUM_LOGPROBS
from scheduler_svc.core.request import DEFERRED_TOKENS, Delivery, End, EndReason, Params
from scheduler_svc.core.sequence import Group, Sequence
from scheduler_svc.gateway.connection import GatewayConnection

# Of the token at an index: itself, as a log-probability's bytes.
PACKED = struct.Struct("<Iff")


async def always() -> None:
    pass


def group_of(attachment: int, n: int = 1, num_logprobs: int = 0) -> Group:
    params = Params(0, 0, 1, 1, max_tokens=1000, num_logprobs=num_logprobs)
    group = bare_group(str(attachment), params)
    group.sequences = [Sequence(at, group, at, array("I", [7]), 1, 1) for at in range(n)]
    group.num_live = n
    return group


def entry(token_id: int) -> bytes:
    packed = PACKED.pack(token_id, 0.0, 0.0)
    assert len(packed) == ENTRY_BYTES
    return packed


def step(connection: GatewayConnection, groups: list[Group], num_tokens: int = 1) -> None:
    """Deliver `num_tokens` tokens to every choice that has not ended, as a commit does."""
    step_of(connection, [sequence for group in groups for sequence in group.sequences], num_tokens)


def step_of(connection: GatewayConnection, sequences: list[Sequence], num_tokens: int) -> None:
    delivery = Delivery()
    for sequence in sequences:
        if sequence.end is None:
            group = sequence.group
            first = sequence.num_output_tokens
            token_ids = list(range(first, first + num_tokens))
            packed = b"".join(map(entry, token_ids)) * group.params.num_logprobs
            sequence.token_ids.extend(token_ids)
            sequence.logprobs += packed
            sequence.num_journaled += num_tokens
            delivery.attachments.append(group.attachment)
            delivery.choices.append(sequence.choice)
            delivery.first_indices.append(first)
            delivery.num_tokens.append(num_tokens)
            delivery.token_ids += token_ids
            delivery.logprobs.append(packed)
    if not any(delivery.logprobs):
        delivery.logprobs = []
    connection.deliver(delivery)


def end(connection: GatewayConnection, sequence: Sequence) -> None:
    sequence.end = End(EndReason.LENGTH, sequence.num_output_tokens)
    sequence.is_finished = True
    sequence.group.num_live -= 1
    connection.ended(sequence, sequence.end)


@dataclass
class Listener:
    """Reads and checks the frames; the tokens of a choice are the numbers from 0 on."""

    connection: GatewayConnection
    num_frames: int = 0
    received: dict[tuple[int, int], int] = field(default_factory=dict)
    ended: dict[tuple[int, int], int] = field(default_factory=dict)

    async def listen(self) -> None:
        frames = aiter(self.connection.frames())
        while self.connection._pending.is_set():
            self._take(await anext(frames))
        await frames.aclose()

    def _take(self, frame: scheduler_pb2.ConnectResponse) -> None:
        self.num_frames += 1
        deltas, start, at = frame.deltas, 0, 0
        for place, key in enumerate(zip(deltas.attachments, deltas.choices, strict=True)):
            first, count = deltas.first_indices[place], deltas.num_tokens[place]
            expected = list(range(first, first + count))
            assert self.received.get(key, 0) == first
            assert list(deltas.token_ids[start : start + count]) == expected
            self.received[key] = first + count
            start += count
            if deltas.num_logprobs and deltas.num_logprobs[place]:
                assert deltas.num_logprobs[place] == 1
                packed = b"".join(map(entry, expected))
                assert deltas.logprobs[at : at + len(packed)] == packed
                at += len(packed)
        assert start == len(deltas.token_ids)
        assert at == len(deltas.logprobs)
        for ended in frame.choice_ends:
            self.ended[ended.attachment, ended.choice] = ended.num_tokens


async def test_deferred_delivery_requests_have_few_frames() -> None:
    connection = GatewayConnection(epoch=1, may_send=always)
    groups = [group_of(number) for number in range(1, 9)]
    for number, group in enumerate(groups, 1):
        connection.attach(group, number, [], tokens_per_frame=DEFERRED_TOKENS)
    listener = Listener(connection)
    await listener.listen()
    listener.num_frames = 0
    for _ in range(1 + 3 * DEFERRED_TOKENS):
        step(connection, groups)
        await listener.listen()
    # The first tokens, and three full buffers.
    assert listener.num_frames == 4
    assert set(listener.received.values()) == {1 + 3 * DEFERRED_TOKENS}


async def test_an_end_is_sent_at_once_with_all_tokens_before_it() -> None:
    connection = GatewayConnection(epoch=1, may_send=always)
    groups = [group_of(number) for number in (1, 2)]
    for number, group in enumerate(groups, 1):
        connection.attach(group, number, [], tokens_per_frame=DEFERRED_TOKENS)
    for _ in range(5):
        step(connection, groups)
    end(connection, groups[0].sequences[0])
    listener = Listener(connection)
    await listener.listen()
    assert listener.received == {(1, 0): 5, (2, 0): 1}
    assert listener.ended == {(1, 0): 5}


async def test_replayed_tokens_are_not_sent_again() -> None:
    """A stream is resumed with some tokens, of which the gateway has a part."""
    connection = GatewayConnection(epoch=1, may_send=always)
    group = group_of(1)
    step(GatewayConnection(epoch=1, may_send=always), [group], 9)
    connection.attach(group, 5, [4], tokens_per_frame=DEFERRED_TOKENS)
    listener = Listener(connection, received={(5, 0): 4})
    await listener.listen()
    assert listener.received == {(5, 0): 9}
    for _ in range(DEFERRED_TOKENS):
        step(connection, [group])
    await listener.listen()
    assert listener.received == {(5, 0): 9 + DEFERRED_TOKENS}


async def test_nothing_is_sent_of_a_released_request() -> None:
    connection = GatewayConnection(epoch=1, may_send=always)
    group, other = group_of(1), group_of(2)
    connection.attach(group, 1, [], tokens_per_frame=DEFERRED_TOKENS)
    connection.attach(other, 2, [], tokens_per_frame=DEFERRED_TOKENS)
    step(connection, [group, other], 2)
    step(connection, [group, other], 2)
    connection.unsubscribe(group)
    step(connection, [other], DEFERRED_TOKENS)
    listener = Listener(connection)
    await listener.listen()
    assert listener.received == {(1, 0): 2, (2, 0): 4 + DEFERRED_TOKENS}


async def test_a_failure_follows_all_tokens_before_it() -> None:
    connection = GatewayConnection(epoch=1, may_send=always)
    groups = [group_of(number) for number in (1, 2)]
    for number, group in enumerate(groups, 1):
        connection.attach(group, number, [], tokens_per_frame=8)
    for _ in range(5):
        step(connection, groups)
    connection.failed(groups[0], failed(StatusCode.INTERNAL, "LOST", "it is lost"))
    frame = await anext(aiter(connection.frames()))
    assert [failure.attachment for failure in frame.failures] == [1]
    received = dict.fromkeys((1, 2), 0)
    for attachment, count in zip(frame.deltas.attachments, frame.deltas.num_tokens, strict=True):
        received[attachment] += count
    assert received == {1: 5, 2: 1}


async def test_many_requests_with_log_probabilities_do_not_disconnect_their_gateway() -> None:
    """Sent together they would exceed the limit of unread tokens."""
    connection = GatewayConnection(epoch=1, may_send=always)
    groups = [group_of(number, num_logprobs=MAX_NUM_LOGPROBS) for number in range(1, 1501)]
    for number, group in enumerate(groups, 1):
        connection.attach(group, number, [], tokens_per_frame=DEFERRED_TOKENS)
    frames, num_tokens = aiter(connection.frames()), 0
    for _ in range(1 + DEFERRED_TOKENS):
        step(connection, groups)
        while connection._pending.is_set():
            num_tokens += len((await anext(frames)).deltas.token_ids)
    assert num_tokens >= 1500 * DEFERRED_TOKENS


@given(
    original=st.lists(
        st.tuples(st.sampled_from([1, 2, 5, DEFERRED_TOKENS]), st.integers(1, 3), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    steps=st.lists(
        st.tuples(st.integers(0, 15), st.integers(1, 5), st.booleans()), min_size=1, max_size=60
    ),
)
@settings(max_examples=100, deadline=None)
async def test_every_request_receives_all_tokens_in_order(
    original: list[tuple[int, int, bool]], steps: list[tuple[int, int, bool]]
) -> None:
    connection = GatewayConnection(epoch=1, may_send=always)
    groups = []
    for number, (tokens_per_frame, n, with_logprobs) in enumerate(original, 1):
        groups.append(group_of(number, n, int(with_logprobs)))
        connection.attach(groups[-1], number, [], tokens_per_frame)
    listener = Listener(connection)
    for chosen, num_tokens, is_heard in steps:
        scheduled = [group for at, group in enumerate(groups) if chosen >> at & 1]
        step(connection, scheduled, num_tokens)
        if is_heard:
            await listener.listen()
        for (tokens_per_frame, _, _), group in zip(original, groups, strict=True):
            for sequence in group.sequences if is_heard else ():
                received = listener.received.get((group.attachment, sequence.choice), 0)
                behind = sequence.num_output_tokens - received
                assert behind < tokens_per_frame
                assert received or not sequence.num_output_tokens
    for group in groups:
        for sequence in group.sequences:
            end(connection, sequence)
    await listener.listen()
    for group in groups:
        for sequence in group.sequences:
            key = group.attachment, sequence.choice
            assert (
                listener.received.get(key, 0) == listener.ended[key] == sequence.num_output_tokens
            )
    assert not connection.attached


_ACTS = st.one_of(
    # Steps of the same choices: which, how many tokens each, how often, whether frames are read.
    st.tuples(
        st.sampled_from([0b111111, 0b000111, 0b111000, 0b101010, 0b000001]),
        st.sampled_from([1, 1, 1, 2]),
        st.integers(1, 12),
        st.booleans(),
    ),
    # The end of a choice, or another attachment of a request.
    st.integers(0, 5),
    st.sampled_from(["first", "second"]),
)


@given(
    intervals=st.tuples(*[st.sampled_from([1, 2, 3, 5, DEFERRED_TOKENS])] * 2),
    with_logprobs=st.booleans(),
    acts=st.lists(_ACTS, min_size=1, max_size=30),
)
@settings(max_examples=200, deadline=None)
async def test_choices_that_decode_together_for_a_while_receive_all_tokens(
    intervals: tuple[int, int],
    with_logprobs: bool,
    acts: list[tuple[int, int, int, bool] | int | str],
) -> None:
    """Two requests of three choices, on lanes that change."""
    connection = GatewayConnection(epoch=1, may_send=always)
    groups = [group_of(1, 3), group_of(2, 3, int(with_logprobs))]
    sequences = [sequence for group in groups for sequence in group.sequences]
    for group, interval in zip(groups, intervals, strict=True):
        connection.attach(group, group.attachment or int(group.key.request_id), [], interval)
    listener = Listener(connection)
    num_attachments = 2
    for act in acts:
        if isinstance(act, tuple):
            chosen, num_tokens, times, is_heard = act
            rows = [one for at, one in enumerate(sequences) if chosen >> at & 1]
            for _ in range(times):
                step_of(connection, rows, num_tokens)
                if is_heard:
                    await listener.listen()
                    check_interval(listener, groups)
        elif isinstance(act, int):
            if sequences[act].end is None:
                end(connection, sequences[act])
        else:
            group = groups[act == "second"]
            if group.num_live == 0:
                continue
            await listener.listen()
            num_attachments += 1
            before = [listener.received.get((group.attachment, at), 0) for at in range(3)]
            connection.unsubscribe(group)
            for at, count in enumerate(before):
                listener.received[num_attachments, at] = count
            connection.attach(group, num_attachments, before, group.tokens_per_frame)
    for sequence in sequences:
        if sequence.end is None:
            end(connection, sequence)
    await listener.listen()
    for sequence in sequences:
        key = sequence.group.attachment, sequence.choice
        assert listener.received.get(key, 0) == sequence.num_output_tokens


def check_interval(listener: Listener, groups: list[Group]) -> None:
    for group in groups:
        for sequence in group.sequences:
            received = listener.received.get((group.attachment, sequence.choice), 0)
            assert sequence.num_output_tokens - received < group.tokens_per_frame
            assert received or not sequence.num_output_tokens


async def test_a_steady_lane_s_tokens_are_joined_without_looking_at_each() -> None:
    connection = GatewayConnection(epoch=1, may_send=always)
    groups = [group_of(number) for number in (1, 2, 3)]
    for number, group in enumerate(groups, 1):
        connection.attach(group, number, [], tokens_per_frame=4)
    listener = Listener(connection)
    step(connection, groups)
    for _ in range(5):
        for _ in range(4):
            step(connection, groups)
        frame = await anext(aiter(connection.frames()))
        listener._take(frame)
        assert list(frame.deltas.num_tokens)[-3:] == [4, 4, 4]
    [run] = connection._buffer._runs.values()
    assert run.is_empty
    assert set(listener.received.values()) == {21}
