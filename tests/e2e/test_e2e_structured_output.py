"""Structured output of the demo model while parts are killed, in real processes."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from jsonschema import validate
from waiting import until

from quire import AsyncClient, RequestDelta, RequestOutput, SamplingParams, StructuredOutput
from quire.client.errors import CancelledError, UnavailableError
from quire.client.operations import Operations
from quire.internal.v1 import operations_pb2
from quire.launcher.stack import LocalStack

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "function_name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["function", "method", "class"]},
        "arguments": {
            "type": "array",
            "items": {"type": "string", "maxLength": 12},
            "maxItems": 4,
        },
        "line_number": {"type": "integer", "minimum": 1, "maximum": 9999},
    },
    "required": ["function_name", "kind", "arguments", "line_number"],
    "additionalProperties": False,
}
SETTINGS = {
    "QUIRE_WORKER_DTYPE": "float32",
    "QUIRE_WORKER_DEVICE": "cpu",
    "QUIRE_WORKER_THREADS": "1",
    "QUIRE_WORKER_MAX_MODEL_LEN": "512",
}
NUM_REQUESTS = 8
# At least 240 tokens.
LONG = SamplingParams(
    seed=1, max_tokens=480, structured_output=StructuredOutput(regex="([a-z]{1,3} [0-9]){120}")
)

pytestmark = pytest.mark.slow


def params(seed: int, **changes: Any) -> SamplingParams:
    return SamplingParams(
        seed=seed, max_tokens=300, structured_output=StructuredOutput(json=SCHEMA), **changes
    )


async def ask(client: AsyncClient, **changes: Any) -> list[RequestOutput]:
    return await asyncio.gather(
        *(client.generate("Return the", params(seed, **changes)) for seed in range(NUM_REQUESTS))
    )


def texts(outputs: list[RequestOutput]) -> list[str]:
    for output in outputs:
        for choice in output.outputs:
            assert choice.finish_reason == "stop"
            validate(json.loads(choice.text), SCHEMA)
    return [choice.text for output in outputs for choice in output.outputs]


def workers_of(stack: LocalStack) -> Sequence[operations_pb2.WorkerStatus]:
    leader = stack.leader()
    assert leader is not None
    assert leader.address is not None
    with Operations(leader.address) as operations:
        return operations.status(False, 5).workers


def num_forced(stack: LocalStack) -> tuple[int, int]:
    """Sampled tokens of all workers, and how many of them jumps have added."""
    workers = workers_of(stack)
    return (
        sum(worker.num_sampled_tokens for worker in workers),
        sum(worker.num_forced_tokens for worker in workers),
    )


async def test_forced_tokens_are_appended_and_change_nothing() -> None:
    with LocalStack("demo/model", settings=SETTINGS) as stack:
        async with AsyncClient(stack.address) as client:
            jumped = texts(await ask(client))
            sampled, forced = num_forced(stack)
            assert 0.2 * sampled < forced < sampled
            # Jumps have no log-probabilities: such requests sample each token.
            assert texts(await ask(client, logprobs=0)) == jumped
            assert num_forced(stack)[1] == forced
            choices = texts(await ask(client, n=3))
            assert choices[::3] == jumped


@pytest.mark.parametrize("victim", ["worker", "scheduler", "gateway"])
async def test_documents_go_on_after_a_death(victim: str) -> None:
    with LocalStack(
        "demo/model",
        num_workers=2,
        num_schedulers=2,
        num_gateways=2,
        settings=SETTINGS,
        restart=True,
    ) as stack:
        target = ",".join(stack.addresses)
        async with AsyncClient(target) as client:
            undisturbed = texts(await ask(client))

            async def stream(seed: int, received: list[str]) -> None:
                async for message in client.stream_generate("Return the", params(seed)):
                    received += [delta.text for delta in message.outputs]

            received: list[list[str]] = [[] for _ in range(NUM_REQUESTS)]
            streams = [
                asyncio.create_task(stream(seed, parts)) for seed, parts in enumerate(received)
            ]
            await until(lambda: "".join(received[0]).startswith('{"function_name": "'), "a name")
            processes = stack.processes(victim)
            if victim == "scheduler":
                processes = [process for process in processes if process is stack.leader()]
            os.kill(processes[0].pid, 9)
            await asyncio.gather(*streams)
        assert ["".join(parts) for parts in received] == undisturbed


async def test_a_unary_document_goes_on_under_the_next_leader() -> None:
    with LocalStack("demo/model", num_schedulers=2, settings=SETTINGS, restart=True) as stack:
        async with AsyncClient(stack.address) as client:
            undisturbed = await client.generate("Return the", LONG)
            assert undisturbed.outputs[0].finish_reason == "stop"
            num_sampled = num_forced(stack)[0]
            asking = asyncio.create_task(client.generate("Return the", LONG))
            await until(lambda: num_forced(stack)[0] > num_sampled, "its first tokens")
            leader = stack.leader()
            assert leader is not None
            os.kill(leader.pid, 9)
            assert not asking.done()
            assert (await asking).outputs == undisturbed.outputs


class Reader:
    """What a client has received of a stream."""

    def __init__(self) -> None:
        self.text = ""
        self.num_tokens = 0

    async def read(self, stream: AsyncIterator[RequestDelta]) -> None:
        async for message in stream:
            self.text += message.text
            self.num_tokens += sum(len(delta.token_ids) for delta in message.outputs)


async def test_a_document_is_resumed_after_its_gateway_was_killed() -> None:
    """By its id, at another gateway and by another client."""
    with LocalStack("demo/model", num_gateways=2, settings=SETTINGS, restart=True) as stack:
        async with (
            AsyncClient(stack.addresses[0], resume_timeout_s=0) as client,
            AsyncClient(stack.addresses[1]) as other,
        ):
            undisturbed = (await other.generate("Return the", LONG)).text
            reader = Reader()
            stream = client.stream_generate(
                "Return the", LONG, request_id="resumed", resume_window_s=30
            )
            reading = asyncio.create_task(reader.read(stream))
            await until(lambda: reader.num_tokens > 10, "the first tokens")
            os.kill(stack.processes("gateway")[0].pid, 9)
            with pytest.raises(UnavailableError):
                await reading
            assert 10 < reader.num_tokens < 240
            await reader.read(other.resume("resumed", [reader.num_tokens]))
            assert reader.text == undisturbed


async def test_a_document_is_cancelled_in_the_middle() -> None:
    with LocalStack("demo/model", settings=SETTINGS) as stack:
        async with AsyncClient(stack.address) as client:
            undisturbed = await client.generate("Return the", LONG)
            beside = asyncio.create_task(client.generate("Return the", LONG))
            reader = Reader()
            stream = client.stream_generate("Return the", LONG, request_id="cancelled")
            reading = asyncio.create_task(reader.read(stream))
            await until(lambda: reader.num_tokens > 10, "the first tokens")
            await client.cancel("cancelled")
            with pytest.raises(CancelledError):
                await reading
            assert reader.num_tokens < 240
            assert undisturbed.text.startswith(reader.text)
            assert (await beside).text == undisturbed.text
            await until(lambda: workers_of(stack)[0].num_running == 0, "the end of all rows")
