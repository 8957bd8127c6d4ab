"""Log-probabilities of real models: those of transformers, alone and in a batch."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import torch
from tiny_models import FAMILIES, save_model
from transformers import AutoModelForCausalLM
from worker_driver import (
    LOGPROBS_TOLERANCE,
    STEPS_QUEUE_UP,
    LaneClient,
    Sampling,
    Sequence,
    ServedWorker,
    admit,
    append,
    schedule,
    served_model,
)

from quire.internal.v1 import worker_pb2

_PROMPT = [5, 17, 99, 3, 42, 8, 150, 61, 7, 7, 23]
_Entries = list[tuple[int, int, float]]  # token id, rank, log-probability


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(FAMILIES[request.param](), tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=STEPS_QUEUE_UP)
async def worker(model: Path, request: pytest.FixtureRequest) -> AsyncIterator[ServedWorker]:
    async with served_model(model, steps_queue_up=request.param) as worker:
        yield worker


def entries_by_row(result: worker_pb2.StepResult) -> dict[int, _Entries]:
    found = result.logprobs
    entries = list(zip(found.token_ids, found.ranks, found.logprobs, strict=True))
    by_row, start = {}, 0
    for row, count in zip(result.sampled_rows, found.num_entries, strict=True):
        by_row[row] = entries[start : start + count]
        start += count
    assert start == len(entries)
    return by_row


async def run(
    worker: ServedWorker, sequences: list[Sequence], num_steps: int
) -> list[worker_pb2.StepResult]:
    """Prompts whole in the first step, then a token of each in every step."""
    lane = LaneClient(worker.stub)
    lane.step = (await lane.open()).last_finished_step
    free = list(range(199, 0, -1))
    results = []
    for step in range(num_steps):
        plan = worker_pb2.BatchPlan()
        for sequence in sequences:
            blocks = sequence.blocks_for(len(sequence.tokens) + step, free)
            if step == 0:
                admit(plan, sequence)
            else:
                append(plan, sequence.row, blocks)
            schedule(plan, sequence.row, len(sequence.tokens) if step == 0 else 1)
        results.append(await lane.run(plan))
    return results


def asking(row: int, num_logprobs: int, **sampling: float) -> Sequence:
    values = Sampling(num_logprobs=num_logprobs, **sampling)  # type: ignore[arg-type]
    return Sequence(row, list(_PROMPT), len(_PROMPT), sampling=values)


def reference(model: Path, tokens: list[int]) -> torch.Tensor:
    """Of the token after the last one."""
    network = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        logits: torch.Tensor = network(torch.tensor([tokens])).logits[0, -1]
    return logits.log_softmax(-1)


async def test_they_are_those_of_transformers(worker: ServedWorker, model: Path) -> None:
    results = await run(worker, [asking(0, 6, temperature=1.5, seed=4)], 4)
    tokens = list(_PROMPT)
    for result in results:
        expected = reference(model, tokens)
        [chosen, *top] = entries_by_row(result)[0]
        assert chosen[0] == result.sampled_token_ids[0]
        assert chosen[1] == (expected > expected[chosen[0]]).sum() + 1
        best = expected.topk(5)
        assert [(token, rank) for token, rank, _ in top] == list(
            zip(best.indices.tolist(), range(1, 6), strict=True)
        )
        for token, _, logprob in (chosen, *top):
            assert logprob == pytest.approx(expected[token].item(), abs=LOGPROBS_TOLERANCE)
        tokens.append(chosen[0])


async def test_they_are_the_same_alone_and_in_a_batch(worker: ServedWorker) -> None:
    alone = await run(worker, [asking(0, 4, temperature=1.0, seed=11)], 6)
    counts = [0, 1, 4, 21, 0, 2]
    batch = [asking(row, n, temperature=1.0, seed=row) for row, n in enumerate(counts)]
    batch[2] = asking(2, 4, temperature=1.0, seed=11)
    for one, together in zip(alone, await run(worker, batch, 6), strict=True):
        assert list(together.logprobs.num_entries) == counts
        expected, found = entries_by_row(one)[0], entries_by_row(together)[2]
        assert [entry[:2] for entry in found] == [entry[:2] for entry in expected]
        for a, b in zip(found, expected, strict=True):
            assert a[2] == pytest.approx(b[2], abs=LOGPROBS_TOLERANCE)


async def test_there_are_no_logprobs_without_a_request(worker: ServedWorker) -> None:
    for result in await run(worker, [asking(0, 0), asking(1, 0)], 2):
        assert not result.HasField("logprobs")


async def test_too_many_are_refused(worker: ServedWorker) -> None:
    lane = LaneClient(worker.stub)
    await lane.open()
    plan = worker_pb2.BatchPlan()
    asked = Sampling(num_logprobs=34)
    admit(plan, Sequence(0, _PROMPT, len(_PROMPT), 0, [1, 2, 3], asked))
    await lane.send(plan)
    assert await lane.ended() is grpc.StatusCode.INTERNAL
    assert "34 log-probabilities, at most 33" in await lane.call.details()
