"""Patient requests hear of many tokens at once, all others of each at once."""

import struct
from array import array
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.internal.v1 import scheduler_pb2
from scheduler_svc.core.logprobs import ENTRY_BYTES, MAX_NUM_LOGPROBS
from scheduler_svc.core.sequence import Delivery, End, EndReason, Group, Nobody, Params, Sequence
from scheduler_svc.gateways.connection import GatewayConnection
from scheduler_svc.gateways.gathering import PATIENT_TOKENS
from scheduler_svc.store.requests import RequestKey

# Of the token at an index: itself, as a log-probability's bytes.
PACKED = struct.Struct("<Iff")


async def always() -> None:
    pass


def group_of(attachment: int, n: int = 1, num_logprobs: int = 0) -> Group:
    params = Params(0, 0, 1, 1, max_tokens=1000, num_logprobs=num_logprobs)
    group = Group(RequestKey("", str(attachment)), params, Nobody())
    group.sequences = [Sequence(at, group, at, array("I", [7]), 1, 1) for at in range(n)]
    group.num_live = n
    return group


def entry(token_id: int) -> bytes:
    packed = PACKED.pack(token_id, 0.0, 0.0)
    assert len(packed) == ENTRY_BYTES
    return packed


def step(connection: GatewayConnection, groups: list[Group], num_tokens: int = 1) -> None:
    """Every choice that has not ended gets so many tokens, as a commit journals them."""
    delivery = Delivery()
    for group in groups:
        for sequence in group.sequences:
            if sequence.end is not None:
                continue
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
    sequence.has_left = True
    sequence.group.num_live -= 1
    connection.ended(sequence, sequence.end)


@dataclass
class Listener:
    """Reads what was said so far; the tokens of a choice are the numbers from 0 on."""

    connection: GatewayConnection
    num_frames: int = 0
    heard: dict[tuple[int, int], int] = field(default_factory=dict)
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
            assert self.heard.get(key, 0) == first
            assert list(deltas.token_ids[start : start + count]) == expected
            self.heard[key] = first + count
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


async def test_patient_requests_have_few_frames() -> None:
    connection = GatewayConnection(epoch=1, may_send=always)
    groups = [group_of(number) for number in range(1, 9)]
    for number, group in enumerate(groups, 1):
        connection.attach(group, number, [], is_patient=True)
    listener = Listener(connection)
    await listener.listen()
    listener.num_frames = 0
    for _ in range(1 + 3 * PATIENT_TOKENS):
        step(connection, groups)
        await listener.listen()
    # The first tokens, and three times all that had gathered.
    assert listener.num_frames == 4
    assert set(listener.heard.values()) == {1 + 3 * PATIENT_TOKENS}


async def test_an_end_is_said_at_once_with_all_before_it() -> None:
    connection = GatewayConnection(epoch=1, may_send=always)
    groups = [group_of(number) for number in (1, 2)]
    for number, group in enumerate(groups, 1):
        connection.attach(group, number, [], is_patient=True)
    for _ in range(5):
        step(connection, groups)
    end(connection, groups[0].sequences[0])
    listener = Listener(connection)
    await listener.listen()
    assert listener.heard == {(1, 0): 5, (2, 0): 1}
    assert listener.ended == {(1, 0): 5}


async def test_what_was_said_again_is_not_said_a_third_time() -> None:
    """A stream that is taken up with some tokens, of which the gateway has a part."""
    connection = GatewayConnection(epoch=1, may_send=always)
    group = group_of(1)
    step(GatewayConnection(epoch=1, may_send=always), [group], 9)
    connection.attach(group, 5, [4], is_patient=True)
    listener = Listener(connection, heard={(5, 0): 4})
    await listener.listen()
    assert listener.heard == {(5, 0): 9}
    for _ in range(PATIENT_TOKENS):
        step(connection, [group])
    await listener.listen()
    assert listener.heard == {(5, 0): 9 + PATIENT_TOKENS}


async def test_nothing_is_said_of_what_was_let_go() -> None:
    connection = GatewayConnection(epoch=1, may_send=always)
    group, other = group_of(1), group_of(2)
    connection.attach(group, 1, [], is_patient=True)
    connection.attach(other, 2, [], is_patient=True)
    step(connection, [group, other], 2)
    step(connection, [group, other], 2)
    connection.let_go(group)
    step(connection, [other], PATIENT_TOKENS)
    listener = Listener(connection)
    await listener.listen()
    assert listener.heard == {(1, 0): 2, (2, 0): 4 + PATIENT_TOKENS}


async def test_many_with_log_probabilities_do_not_have_their_gateway_cut_off() -> None:
    """All at once they would be more than a gateway may leave unread."""
    connection = GatewayConnection(epoch=1, may_send=always)
    groups = [group_of(number, num_logprobs=MAX_NUM_LOGPROBS) for number in range(1, 1501)]
    for number, group in enumerate(groups, 1):
        connection.attach(group, number, [], is_patient=True)
    frames, num_tokens = aiter(connection.frames()), 0
    for _ in range(1 + PATIENT_TOKENS):
        step(connection, groups)
        while connection._pending.is_set():
            num_tokens += len((await anext(frames)).deltas.token_ids)
    assert num_tokens >= 1500 * PATIENT_TOKENS


@given(
    asked=st.lists(
        st.tuples(st.booleans(), st.integers(1, 3), st.booleans()), min_size=1, max_size=4
    ),
    steps=st.lists(
        st.tuples(st.integers(0, 15), st.integers(1, 5), st.booleans()), min_size=1, max_size=60
    ),
)
@settings(max_examples=100, deadline=None)
async def test_everybody_hears_everything_in_its_order(
    asked: list[tuple[bool, int, bool]], steps: list[tuple[int, int, bool]]
) -> None:
    connection = GatewayConnection(epoch=1, may_send=always)
    groups = []
    for number, (is_patient, n, with_logprobs) in enumerate(asked, 1):
        groups.append(group_of(number, n, int(with_logprobs)))
        connection.attach(groups[-1], number, [], is_patient)
    listener = Listener(connection)
    for chosen, num_tokens, is_heard in steps:
        scheduled = [group for at, group in enumerate(groups) if chosen >> at & 1]
        step(connection, scheduled, num_tokens)
        if is_heard:
            await listener.listen()
        for (is_patient, _, _), group in zip(asked, groups, strict=True):
            for sequence in group.sequences if is_heard else ():
                heard = listener.heard.get((group.attachment, sequence.choice), 0)
                behind = sequence.num_output_tokens - heard
                assert behind < (PATIENT_TOKENS if is_patient else 1)
                assert heard or not sequence.num_output_tokens
    for group in groups:
        for sequence in group.sequences:
            end(connection, sequence)
    await listener.listen()
    for group in groups:
        for sequence in group.sequences:
            key = group.attachment, sequence.choice
            assert listener.heard.get(key, 0) == listener.ended[key] == sequence.num_output_tokens
    assert not connection.attached
