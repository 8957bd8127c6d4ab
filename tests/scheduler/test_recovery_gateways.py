"""Gateways that were away, cut off and back; their clients have gone on elsewhere meanwhile."""

import gc

import pytest
import redis
from ledger_worker import LedgerWorker
from scheduler_stack import Heard, info_of, prompt, running_stack
from waiting import until

from quire.internal.v1 import scheduler_pb2
from quire.service.protocol import PROTOCOL_VERSION
from scheduler_svc.engine import Engine


@pytest.mark.parametrize("resumed", [False, True], ids=["begun there", "resumed there"])
async def test_a_gateway_that_comes_back_leaves_a_stream_where_its_client_has_gone(
    redis_url, sockets, resumed
):
    worker = LedgerWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        first, other = await stack.gateway(), await stack.gateway()
        asked = first.heard[await first.submit(prompt(9), max_tokens=12)]
        await until(lambda: min(asked.next_indices) >= 3, "tokens")
        worker.gate.clear()
        await first.close()
        hello = scheduler_pb2.GatewayHello(gateway_id=b"other", protocol_version=PROTOCOL_VERSION)
        await other.send(hello=hello)
        taken = other.heard[await other.attach(asked, 2)]
        await until(lambda: taken.accepted, "acceptance")
        back = await stack.gateway()
        if resumed:
            known = Heard(asked.submission, asked.choices)
            wanted = scheduler_pb2.Attachment(
                attachment=back._listen(known),
                request_id=asked.submission.request_id,
                next_indices=asked.next_indices,
                again=True,
            )
            await back.send(attachments=[wanted])
        else:
            known = back.heard[await back.submit_again(asked)]
        await until(lambda: known.failure is not None, "a refusal")
        assert info_of(known.failure).reason == "TAKEN_OVER"
        worker.gate.set()
        await other.over()
        assert taken.is_whole


async def test_a_leadership_that_is_over_leaves_nothing_in_memory(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": LedgerWorker(1)}) as stack:
        for _ in range(4):
            gateway = await stack.gateway()
            former = stack.engine
            with redis.Redis.from_url(redis_url) as client:
                client.flushall()
            await until(
                lambda g=gateway, f=former: (
                    g.lost and stack.scheduler.leading and stack.engine is not f
                ),
                "the next leadership",
            )
        del former, gateway
        stack.gateways.clear()

        def engines() -> list[Engine]:
            gc.collect()
            return [one for one in gc.get_objects() if isinstance(one, Engine)]

        # gRPC's server holds its last call, and what that has of the leadership before.
        await until(lambda: len(engines()) <= 2, "the end of former engines")
