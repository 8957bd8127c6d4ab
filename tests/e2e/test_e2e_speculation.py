"""Speculative decoding over real services: what it saves, and that it changes nothing."""

import asyncio
import os
from typing import Any

import pytest
from waiting import until

from quire import AsyncClient, SamplingParams, StructuredOutput
from quire.client.operations import Operations
from quire.launcher.stack import LocalStack

SETTINGS = {
    "QUIRE_WORKER_DTYPE": "float32",
    "QUIRE_WORKER_DEVICE": "cpu",
    "QUIRE_WORKER_THREADS": "1",
    "QUIRE_WORKER_MAX_MODEL_LEN": "512",
    # Prompts are computed in chunks, beside rows with drafts.
    "QUIRE_WORKER_MAX_NUM_BATCHED_TOKENS": "64",
    "QUIRE_SCHEDULER_CHECK_EVERY_STEP": "true",
}
SPECULATING = {**SETTINGS, "QUIRE_WORKER_NUM_SPECULATIVE_TOKENS": "5"}
LISTS = "def first(values):\n    return values[0]\n\n\n"
PROMPTS = [
    LISTS * 6,
    "a b c d e f g h " * 12,
]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0, "logprobs": 2, "ignore_eos": True},
    {"temperature": 0.8, "top_p": 0.9, "n": 4},
    {"temperature": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    {"temperature": 1, "structured_output": StructuredOutput(regex="([a-z]{1,3} [0-9]){30}")},
    {"temperature": 0, "stop": ["values", "d e f"]},
]

pytestmark = pytest.mark.slow


async def written(client: AsyncClient) -> list[list[list[int]]]:
    """The tokens of every prompt with every kind of parameters, all at once, and then alone."""

    async def ask(prompt: str, seed: int, kind: dict[str, Any]) -> list[list[int]]:
        params = SamplingParams(seed=seed, max_tokens=80, **kind)
        output = await client.generate(prompt, params)
        for choice in output.outputs if "logprobs" in kind else ():
            assert choice.logprobs is not None
            pairs = zip(choice.token_ids, choice.logprobs, strict=True)
            assert all(token_id in entries for token_id, entries in pairs)
        return [list(choice.token_ids) for choice in output.outputs]

    cases = [(prompt, kind) for prompt in PROMPTS for kind in KINDS]
    at_once = await asyncio.gather(*(ask(*one) for one in _numbered(cases)))
    alone = [await ask(*one) for one in _numbered(cases)[::6]]
    assert alone == at_once[::6]
    return at_once


def _numbered(cases: list[tuple[str, Any]]) -> list[tuple[str, int, Any]]:
    return [(prompt, seed, kind) for seed, (prompt, kind) in enumerate(cases)]


def drafts_of(stack: LocalStack) -> tuple[int, int]:
    """Proposed and accepted tokens of all workers."""
    leader = stack.leader()
    assert leader is not None
    assert leader.address is not None
    with Operations(leader.address) as operations:
        workers = operations.status(False, 5).workers
    return (
        sum(sum(worker.num_draft_tokens) for worker in workers),
        sum(sum(worker.num_accepted_tokens) for worker in workers),
    )


async def test_speculation_changes_no_token_and_goes_on_after_a_death() -> None:
    with LocalStack("demo/model", settings=SETTINGS) as stack:
        async with AsyncClient(stack.address) as client:
            expected = await written(client)
            assert drafts_of(stack) == (0, 0)
    with LocalStack(
        "demo/model", num_workers=2, num_schedulers=2, settings=SPECULATING, restart=True
    ) as stack:
        async with AsyncClient(stack.address) as client:
            assert await written(client) == expected
            num_drafts, num_accepted = drafts_of(stack)
            assert num_drafts >= num_accepted > 100
            # Killed in the middle of the work: what is recovered goes on with the same tokens.
            again = asyncio.create_task(written(client))
            await until(lambda: drafts_of(stack)[0] > num_drafts, "drafts of new requests")
            os.kill(stack.processes("worker")[0].pid, 9)
            assert await again == expected
