"""Frames to a gateway that reads slowly, or to which much output is replayed."""

from array import array

import pytest
from bare_groups import bare_group
from grpc import StatusCode

from quire.internal.v1 import scheduler_pb2
from quire.service.errors import RequestError
from scheduler_svc.core.request import Delivery, Params
from scheduler_svc.core.sequence import Group, Sequence
from scheduler_svc.gateway import connection as frames
from scheduler_svc.gateway.connection import GatewayConnection


async def always() -> None:
    pass


def with_output(num_tokens: int) -> Group:
    params = Params(temperature=0, top_k=0, top_p=1, seed=1, max_tokens=num_tokens + 1)
    group = bare_group("r", params)
    tokens = array("I", range(1 + num_tokens))
    group.sequences = [Sequence(1, group, 0, tokens, num_prompt_tokens=1, num_tokens=1)]
    group.sequences[0].num_journaled = num_tokens
    return group


async def sent_frames(connection: GatewayConnection) -> list[scheduler_pb2.ConnectResponse]:
    connection.close()
    return [frame async for frame in connection.frames()]


async def test_a_replay_is_split_between_requests_and_never_disconnects(monkeypatch):
    monkeypatch.setattr(frames, "LARGE_FRAME_TOKENS", 50)
    monkeypatch.setattr(frames, "MAX_PENDING_TOKENS", 50)
    connection = GatewayConnection(epoch=7, may_send=always)
    for attachment in range(1, 5):
        connection.replay(with_output(40), attachment, [])
    received = await sent_frames(connection)
    assert [list(frame.deltas.attachments) for frame in received] == [[1, 2], [3, 4]]
    assert [[a.attachment for a in frame.acceptances] for frame in received] == [[1, 2], [3, 4]]
    assert [frame.epoch for frame in received] == [7, 7]
    assert all(list(frame.deltas.token_ids) == [*range(1, 41)] * 2 for frame in received)


async def test_log_probabilities_of_prompts_are_split_between_frames_and_do_not_count(monkeypatch):
    monkeypatch.setattr(frames, "LARGE_FRAME_TOKENS", 50)
    monkeypatch.setattr(frames, "MAX_PENDING_TOKENS", 50)
    connection = GatewayConnection(epoch=7, may_send=always)
    delivery = Delivery()
    for attachment in range(1, 5):
        of_prompt = b"" if attachment == 2 else bytes([attachment]) * 12 * 40
        delivery.add(attachment, 0, 0, [5], b"", of_prompt)
    connection.deliver(delivery)
    received = await sent_frames(connection)
    assert [list(frame.deltas.attachments) for frame in received] == [[1, 2, 3], [4]]
    assert [
        [
            (found.entry, found.logprobs[0], len(found.logprobs))
            for found in frame.deltas.prompt_logprobs
        ]
        for frame in received
    ] == [[(0, 1, 480), (2, 3, 480)], [(0, 4, 480)]]


@pytest.mark.parametrize("num_logprobs", [0, 4])
async def test_a_gateway_that_does_not_read_its_frames_is_disconnected(monkeypatch, num_logprobs):
    monkeypatch.setattr(frames, "MAX_PENDING_TOKENS", 50)
    connection = GatewayConnection(epoch=7, may_send=always)
    connection.replay(with_output(40), 1, [])
    packed = [bytes(12 * num_logprobs)] if num_logprobs else []
    for index in range(51 // (1 + num_logprobs) + 1):
        connection.deliver(Delivery([1], [0], [40 + index], [1], [5], packed))
    with pytest.raises(RequestError) as refusal:
        await sent_frames(connection)
    assert refusal.value.code is StatusCode.RESOURCE_EXHAUSTED


async def test_all_output_before_the_end_is_sent(monkeypatch):
    connection = GatewayConnection(epoch=7, may_send=always)
    connection.replay(with_output(3), 1, [])
    reading = aiter(connection.frames())
    assert list((await anext(reading)).deltas.token_ids) == [1, 2, 3]
    connection.deliver(Delivery([1], [0], [3], [1], [9]))
    connection.close()
    assert [list(frame.deltas.token_ids) async for frame in reading] == [[9]]
