"""Structured output of the demo model while parts are killed, in real processes."""

import asyncio
import json
import os
from typing import Any

import pytest
from jsonschema import validate
from waiting import until

from quire import AsyncClient, RequestOutput, SamplingParams, StructuredOutput
from quire.client.operations import Operations
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


def num_forced(stack: LocalStack) -> tuple[int, int]:
    """Sampled tokens of all workers, and how many of them jumps have added."""
    leader = stack.leader()
    assert leader is not None
    assert leader.address is not None
    with Operations(leader.address) as operations:
        workers = operations.status(False, 5).workers
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
