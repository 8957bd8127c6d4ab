"""Log-probabilities of prompt tokens: those of transformers, whatever the chunks."""

import struct
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import torch
from tiny_models import FAMILIES, SMALL, VOCAB_SIZE, save_model
from transformers import AutoModelForCausalLM, Llama4TextConfig, OPTConfig, PretrainedConfig
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
from worker_svc.model.served_model import FinalStates
from worker_svc.runner import prompt_slices

# More places than in the test of sampled tokens, so a larger difference among them.
_TOLERANCE = 4 * LOGPROBS_TOLERANCE
_PROMPT = [5, 17, 99, 3, 42, 8, 150, 61, 7, 7, 23]
_Entry = tuple[int, float, int]  # token id, log-probability, rank
_ByToken = dict[int, list[_Entry]]  # by the index of the token


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(FAMILIES[request.param](), tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=STEPS_QUEUE_UP)
async def worker(
    model: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ServedWorker]:
    # Slices of three tokens.
    monkeypatch.setattr(prompt_slices, "_SLICE_BYTES", 3 * 4 * VOCAB_SIZE)
    async with served_model(model, steps_queue_up=request.param) as worker:
        yield worker


def by_row(result: worker_pb2.StepResult) -> dict[int, _ByToken]:
    found, start = result.prompt_logprobs, 0
    entries = list(struct.iter_unpack("<IfI", found.logprobs))
    rows: dict[int, _ByToken] = {}
    for row, first, count, width in zip(
        found.rows, found.first_indices, found.num_tokens, found.num_entries, strict=True
    ):
        for index in range(first, first + count):
            rows.setdefault(row, {})[index] = entries[start : start + width]
            start += width
    assert start == len(entries)
    return rows


async def run_chunks(
    worker: ServedWorker, sequences: list[Sequence], chunk: int
) -> dict[int, _ByToken]:
    """The prompts in chunks, then two more tokens of each."""
    lane = LaneClient(worker.stub)
    lane.step = (await lane.open()).last_finished_step
    free = list(range(199, 0, -1))
    rows: dict[int, _ByToken] = {}
    while any(len(one.tokens) < one.num_prompt_tokens + 2 for one in sequences):
        plan = worker_pb2.BatchPlan()
        for sequence in sequences:
            is_new = not sequence.block_ids
            count = min(chunk, len(sequence.tokens) - sequence.num_computed_tokens)
            end = sequence.num_computed_tokens + count
            blocks = sequence.blocks_for(end, free)
            if is_new:
                admit(plan, sequence)
            else:
                append(plan, sequence.row, blocks)
            schedule(plan, sequence.row, count)
            sequence.num_computed_tokens = end
        result = await lane.run(plan)
        assert not result.failures
        for row, found in by_row(result).items():
            assert found.keys().isdisjoint(rows.setdefault(row, {}))
            rows[row].update(found)
        for row, token in zip(result.sampled_rows, result.sampled_token_ids, strict=True):
            sequences[row].tokens.append(token)
    return rows


def asking(row: int, num_entries: int, prompt: list[int]) -> Sequence:
    return Sequence(
        row, list(prompt), len(prompt), sampling=Sampling(num_prompt_logprobs=num_entries)
    )


def reference(model: Path, prompt: list[int]) -> torch.Tensor:
    """Line i has those of token i + 1."""
    network = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        logits: torch.Tensor = network(torch.tensor([prompt])).logits[0]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("chunk", [1, 7, 100])
async def test_they_are_those_of_transformers(
    worker: ServedWorker, model: Path, chunk: int
) -> None:
    others = [_PROMPT[::-1], _PROMPT[:1], _PROMPT]
    sequences = [
        asking(row, count, prompt)
        for row, (count, prompt) in enumerate(zip([4, 21, 3, 0], [_PROMPT, *others], strict=True))
    ]
    rows = await run_chunks(worker, sequences, chunk)
    # A prompt of one token has none, and the last prompt wants none.
    assert rows.keys() == {0, 1}
    for row, width in ((0, 4), (1, 21)):
        prompt = sequences[row].tokens[: len(_PROMPT)]
        expected = reference(model, prompt)
        assert sorted(rows[row]) == list(range(1, len(prompt)))
        for index, (own, *top) in rows[row].items():
            line = expected[index - 1]
            assert own[0] == prompt[index]
            assert own[2] == (line > line[own[0]]).sum() + 1
            best = line.topk(width - 1)
            assert [(entry[0], entry[2]) for entry in top] == list(
                zip(best.indices.tolist(), range(1, width), strict=True)
            )
            for token, logprob, _ in (own, *top):
                assert logprob == pytest.approx(line[token].item(), abs=_TOLERANCE)


# Their heads read another module than the base model of transformers: a part of it, or one whose
# name is not the prefix of the class.
_OTHER_HEADS = [
    OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32, do_layer_norm_before=False),
    Llama4TextConfig(
        **{**SMALL, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2},
        **{"attn_temperature_tuning": False, "layer_types": ["full_attention"] * 2},
    ),
]


@pytest.mark.parametrize("config", _OTHER_HEADS, ids=lambda config: config.model_type)
async def test_the_head_may_read_any_module(config: PretrainedConfig, tmp_path: Path) -> None:
    model = save_model(config, tmp_path)
    async with served_model(model) as worker:
        rows = await run_chunks(worker, [asking(0, 3, _PROMPT)], 7)
    expected = reference(model, _PROMPT)
    assert sorted(rows[0]) == list(range(1, len(_PROMPT)))
    for index, entries in rows[0].items():
        for token, logprob, _ in entries:
            assert logprob == pytest.approx(expected[index - 1][token].item(), abs=_TOLERANCE)


def test_the_logits_of_a_slice_have_a_bounded_size() -> None:
    """Of 100 tokens of a large vocabulary in slices of 64 MiB."""
    vocab_size, sizes = 500_000, []

    def head(states: torch.Tensor) -> torch.Tensor:
        sizes.append(states.shape[1] * vocab_size * 4)
        return torch.zeros(1, states.shape[1], vocab_size)

    final = FinalStates(torch.zeros(100, 2), head)
    entries = prompt_slices.prompt_logprobs(
        final, torch.arange(100), torch.zeros(100, dtype=torch.int64), 0, vocab_size, None
    )
    assert entries.logprobs.shape == (100, 1)
    assert max(sizes) <= 64 * 2**20
    assert len(sizes) == 4


async def test_after_a_cached_prefix_there_are_those_of_the_rest(worker: ServedWorker) -> None:
    whole = await run_chunks(worker, [asking(0, 2, _PROMPT)], 100)
    # The blocks that row 0 wrote are still there: the first of them is shared.
    lane = LaneClient(worker.stub)
    lane.step = (await lane.open()).last_finished_step
    plan = worker_pb2.BatchPlan()
    sequence = asking(0, 2, _PROMPT)
    sequence.block_ids, sequence.num_computed_tokens = [1, 2, 3], 4
    admit(plan, sequence)
    schedule(plan, 0, len(_PROMPT) - 4)
    rest = by_row(await lane.run(plan))[0]
    assert sorted(rest) == list(range(5, len(_PROMPT)))
    for index, entries in rest.items():
        for found, expected in zip(entries, whole[0][index], strict=True):
            assert found == pytest.approx(expected, abs=_TOLERANCE)


async def test_without_a_request_there_are_none(worker: ServedWorker) -> None:
    lane = LaneClient(worker.stub)
    await lane.open()
    plan = worker_pb2.BatchPlan()
    admit(plan, Sequence(0, _PROMPT, len(_PROMPT), 0, [1, 2, 3]))
    schedule(plan, 0, len(_PROMPT))
    assert not (await lane.run(plan)).HasField("prompt_logprobs")


async def test_too_many_are_refused(worker: ServedWorker) -> None:
    lane = LaneClient(worker.stub)
    await lane.open()
    plan = worker_pb2.BatchPlan()
    asked = Sampling(num_prompt_logprobs=34)
    admit(plan, Sequence(0, _PROMPT, len(_PROMPT), 0, [1, 2, 3], asked))
    await lane.send(plan)
    assert await lane.ended() is grpc.StatusCode.INTERNAL
    assert "34 log-probabilities, at most 33" in await lane.call.details()
