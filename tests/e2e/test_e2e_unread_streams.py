"""Clients that hold many streams and do not read them, or vanish."""

import asyncio

import grpc
import pytest
from waiting import until

from quire import AsyncClient, SamplingParams
from quire.client.operations import Operations
from quire.internal.v1.operations_pb2 import GetStatusResponse
from quire.launcher.stack import LocalStack
from quire.v1 import inference_pb2, inference_pb2_grpc

SETTINGS = {
    "QUIRE_WORKER_ENGINE": "sim",
    "QUIRE_WORKER_SIM_STEP_MS": "2",
    "QUIRE_WORKER_MAX_NUM_SEQS": "256",
    "QUIRE_WORKER_NUM_BLOCKS": "8193",
}
NUM_UNREAD = 1_200
# gRPC's core resets calls that wait for longer than 30 s, by default.
UNREAD_S = 32
NUM_VANISHING = 200
WINDOW_S = 20

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def status(stack: LocalStack) -> GetStatusResponse:
    leader = stack.leader()
    assert leader is not None
    assert leader.address is not None
    with Operations(leader.address) as operations:
        return operations.status(False, 30)


async def test_streams_that_are_not_read_for_long_end_properly() -> None:
    request = inference_pb2.StreamGenerateRequest(
        text="Return", sampling_params=inference_pb2.SamplingParams(max_tokens=4, ignore_eos=True)
    )
    with LocalStack("demo/model", settings=SETTINGS) as stack:
        async with grpc.aio.insecure_channel(stack.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            calls = [stub.StreamGenerate(request) for _ in range(NUM_UNREAD)]
            # The limit is one of gRPC's own clock.
            await asyncio.sleep(UNREAD_S)

            async def num_tokens(
                call: grpc.aio.UnaryStreamCall[
                    inference_pb2.StreamGenerateRequest, inference_pb2.StreamGenerateResponse
                ],
            ) -> int:
                return sum([len(d.token_ids) async for message in call for d in message.deltas])

            assert await asyncio.gather(*map(num_tokens, calls)) == [4] * NUM_UNREAD


async def test_clients_that_vanish_leave_the_service_to_others() -> None:
    endless = SamplingParams(n=16, max_tokens=100_000, ignore_eos=True)
    settings = {**SETTINGS, "QUIRE_WORKER_MAX_MODEL_LEN": "100000"}
    with LocalStack("demo/model", settings=settings) as stack:
        async with AsyncClient(stack.address) as client:
            streams = [
                client.stream_generate("Return", endless, resume_window_s=WINDOW_S)
                for _ in range(NUM_VANISHING)
            ]
            await asyncio.gather(*(anext(stream) for stream in streams))
            await asyncio.gather(*(stream.aclose() for stream in streams))
        async with AsyncClient(stack.address) as other:
            output = await other.generate("Return", SamplingParams(max_tokens=4, ignore_eos=True))
            assert len(output.outputs[0].token_ids) == 4

        def is_idle() -> bool:
            now = status(stack)
            return not now.queue.num_requests and not any(
                worker.num_running + worker.num_assigned + worker.num_swapped
                for worker in now.workers
            )

        await until(is_idle, "the end of all abandoned requests", timeout_s=WINDOW_S + 40)
