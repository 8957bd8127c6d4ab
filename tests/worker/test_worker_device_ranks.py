"""Ranks on GPUs: the steps that are queued on rank 0's device are queued on those of its followers.

The host is in place of GPUs and Gloo in place of NCCL; `test_worker_ranks_gpu.py` has both.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from device_ranks import connect_gloo, leading_device, leading_runner
from host_device import HostCapturer
from rank_threads import rank_threads
from structlog.testing import capture_logs
from tiny_models import MAX_MODEL_LEN, VOCAB_SIZE, gpt2, llama, save_model
from torch import Tensor
from worker_driver import (
    BLOCK_SIZE,
    Sampling,
    Sequence,
    admit,
    append,
    schedule,
    worker_settings,
)

from benchmarks.engines.batcher import steps
from benchmarks.engines.workload import Work
from quire.internal.v1 import worker_pb2
from worker_svc.cache.pool_size import PoolSize
from worker_svc.errors import WrongSettingError
from worker_svc.gpu.device_pass import StepSizes
from worker_svc.gpu.graphs import Replay, capture_decode
from worker_svc.gpu.pipelined_runner import PipelinedRunner
from worker_svc.loading.model_preparation import PreparedModel, prepare_model
from worker_svc.model.load_progress import LoadProgress
from worker_svc.plan.plans import StepOutput, plan_from_proto
from worker_svc.ranks.devices.device_follower import DeviceFollower
from worker_svc.ranks.devices.rank_graphs import RequiredCapturer
from worker_svc.ranks.group import RankGroup
from worker_svc.ranks.leader import Leader
from worker_svc.ranks.messages import Kind, Messages
from worker_svc.runner.step_runner import PendingOutput, no_op

_SIZES = StepSizes(
    max_num_seqs=11, max_num_batched_tokens=40, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE
)
_BLOCKS = PoolSize(300, 8)
_FAMILIES = {"llama": llama, "gpt2": gpt2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, config in _FAMILIES.items():
        save_model(config(), folder / name)
    return folder


def prepared(model: Path, group: RankGroup | None = None) -> PreparedModel:
    settings = worker_settings(model, dtype="float32", device="cpu")
    return prepare_model(settings, torch.device("cpu"), LoadProgress(), group)


@contextmanager
def leading(model: Path, capturers: list[Any]) -> Iterator[PipelinedRunner]:
    with leading_device(lambda group: prepared(model, group), _SIZES, _BLOCKS, capturers) as runner:
        yield runner


def work() -> Work:
    """More than there are rows, prompts longer than a step among them."""
    draw = Random(3)
    prompts = [
        [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice([1, 3, 8, 21, 60]))]
        for _ in range(20)
    ]
    return Work(prompts, [draw.randrange(1, 16) for _ in prompts])


def tokens_of(runner: PipelinedRunner) -> list[list[int]]:
    """The work's tokens, with one step launched before the output of another is read: ids of its
    inputs are on rank 0's device alone."""
    written: list[list[int]] = [[] for _ in work().prompts]
    waiting: list[tuple[dict[int, int], PendingOutput[StepOutput]]] = []

    def complete_oldest() -> None:
        sampling, launched = waiting.pop(0)
        output = launched.output()
        assert not output.failures
        for row, token in zip(output.sampled_rows, output.sampled_token_ids, strict=True):
            written[sampling[row]].append(token)

    for step in steps(
        work(),
        max_num_seqs=_SIZES.max_num_seqs,
        max_num_batched_tokens=_SIZES.max_num_batched_tokens,
        block_size=BLOCK_SIZE,
        num_blocks=_BLOCKS.num_blocks,
    ):
        waiting.append((step.sampling, runner.launch(plan_from_proto(step.plan))))
        if len(waiting) == 2:
            complete_oldest()
    while waiting:
        complete_oldest()
    return written


@pytest.mark.parametrize(
    ("name", "num_ranks", "has_graphs"),
    [
        ("gpt2", 2, True),
        pytest.param("llama", 2, False, marks=pytest.mark.slow),
        pytest.param("llama", 4, True, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_one_rank(
    folder: Path, name: str, num_ranks: int, has_graphs: bool
) -> None:
    expected = tokens_of(leading_runner(prepared(folder / name), _SIZES, _BLOCKS, None, None))
    assert len({tuple(tokens) for tokens in expected}) > 15
    capturers = [HostCapturer() if has_graphs else None for _ in range(num_ranks)]
    with leading(folder / name, capturers) as runner:
        assert tokens_of(runner) == expected
    replays = [capturer.num_replays for capturer in capturers if capturer is not None]
    assert all(each == replays[0] for each in replays)
    assert not has_graphs or sum(replays[0]) > 10


def plan(step: int, row: int, tokens: list[int], blocks: list[int], **sampling: Any) -> Any:
    """A plan that runs the last tokens of a new row, whose first whole blocks are computed."""
    message = worker_pb2.BatchPlan(epoch=1, step=step)
    num_computed = sampling.pop("num_computed", 0)
    chosen = Sampling(1.0, seed=row, **sampling)
    admit(message, Sequence(row, list(tokens), len(tokens), num_computed, blocks, chosen))
    schedule(message, row, len(tokens) - num_computed)
    return message


def outputs_of(runner: PipelinedRunner) -> list[StepOutput]:
    """Log-probabilities of a prompt, a copy of its last block, a swap out and in, and a plan that
    changes blocks and runs nothing."""
    prompt = [5, 17, 99, 3, 42, 8, 150, 61, 7, 7, 23]
    asked = plan(1, 0, prompt, [1, 2, 3], num_prompt_logprobs=3)
    fork = plan(2, 1, prompt, [1, 2, 4], num_computed=10)
    fork.copies.sources.append(3)
    fork.copies.destinations.append(4)
    out = worker_pb2.BatchPlan(epoch=1, step=3, released_rows=[0, 1])
    out.swap_outs.sources.extend([1, 2, 4])
    out.swap_outs.destinations.extend([5, 6, 7])
    back = plan(4, 2, [*prompt, 9], [9, 8, 7], num_computed=11)
    back.swap_ins.sources.extend([5, 6, 7])
    back.swap_ins.destinations.extend([9, 8, 7])
    grown = worker_pb2.BatchPlan(epoch=1, step=5)
    append(grown, 2, [11])
    last = worker_pb2.BatchPlan(epoch=1, step=6)
    schedule(last, 2, 1)
    messages = [asked, fork, out, back, grown, last]
    launched = [runner.launch(plan_from_proto(message)) for message in messages]
    return [each.output() for each in launched]


@pytest.mark.parametrize("has_graphs", [False, True])
def test_followers_move_blocks_and_compute_prompt_logprobs(
    folder: Path, has_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Slices of three tokens.
    monkeypatch.setattr("worker_svc.runner.prompt_slices._SLICE_BYTES", 3 * 4 * VOCAB_SIZE)
    model = folder / "llama"
    expected = outputs_of(leading_runner(prepared(model), _SIZES, _BLOCKS, None, None))
    capturers = [HostCapturer() if has_graphs else None for _ in range(2)]
    with leading(model, capturers) as runner:
        found = outputs_of(runner)
    assert [one.sampled_token_ids for one in found] == [one.sampled_token_ids for one in expected]
    assert [len(one.sampled_token_ids) for one in found] == [1, 1, 0, 1, 0, 1]
    prompts = [each[0].prompt_logprobs for each in (found, expected)]
    ids = [np.frombuffer(each.packed, "<u4").reshape(-1, 3)[:, 0] for each in prompts if each]
    assert len(ids) == 2
    assert (ids[0] == ids[1]).all()


class RefusingCapturer:
    def capture(self, function: Any) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")


def test_a_rank_that_cannot_capture_a_graph_ends_the_start() -> None:
    reason = r"be captured: operation not permitted when stream is capturing; set --enforce-eager"
    with pytest.raises(WrongSettingError, match=reason):
        capture_decode([1], lambda size: no_op, RequiredCapturer(RefusingCapturer()))


def test_a_failing_step_of_rank_0_is_a_lost_rank(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before its pass: the others were sent theirs."""
    lost: list[str] = []
    group: Any = SimpleNamespace(broadcast=no_op, share=no_op, lost=lost.append)
    runner = leading_runner(prepared(folder / "llama"), _SIZES, _BLOCKS, Leader(group), None)

    def fail(arrays: Any) -> Any:
        raise RuntimeError("device")

    monkeypatch.setattr(runner._staging, "send", fail)
    with pytest.raises(RuntimeError, match="device"):
        runner.launch(plan_from_proto(plan(1, 0, [5], [1])))
    assert lost == ["rank 0 failed in a forward pass: device"]


def test_a_failing_pass_of_a_follower_is_a_lost_rank() -> None:
    lost: list[str] = []
    sent: list[Tensor] = []
    Messages(lambda parts: sent.extend(part.clone() for part in parts)).send(
        Kind.STEP, [torch.zeros(1).numpy()]
    )

    class Group:
        rank = 1

        def broadcast(self, parts: list[Tensor]) -> None:
            for part in parts:
                part.copy_(sent.pop(0))

        def lost(self, reason: str) -> None:
            lost.append(reason)

    group: Any = Group()
    nothing: Any = None
    with pytest.raises(ValueError, match="not enough values"):
        DeviceFollower(nothing, nothing, group).run()
    assert len(lost) == 1
    assert lost[0].startswith("rank 1 failed in a forward pass: ")


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_exchanges_of_devices(num_ranks: int) -> None:
    with rank_threads(num_ranks, connect_devices=connect_gloo) as ranks:
        groups = ranks.groups
        ones = torch.ones(2, 3)
        # Of a view, which is not contiguous.
        sums = ranks.run(lambda rank: groups[rank].sum((ones * (rank + 1)).T))
        gathered = ranks.run(lambda rank: groups[rank].gather(ones * rank, 3 * num_ranks - 1))
        empty = ranks.run(lambda rank: groups[rank].gather(ones[:0], 5))
        ids = [torch.tensor([rank, 7]) for rank in range(num_ranks)]
        ranks.run(lambda rank: groups[rank].share(ids[rank]))
        assert [group.columns(1, 1) for group in groups] == [None] * num_ranks
    total = num_ranks * (num_ranks + 1) / 2
    assert all(torch.equal(each, torch.full((3, 2), total)) for each in sums)
    columns = [rank for rank in range(num_ranks) for _ in range(3)][:-1]
    assert gathered[0].tolist() == [columns] * 2
    assert gathered[0].is_contiguous()
    assert [each.shape for each in empty] == [(0, 5)] * num_ranks
    assert [each.tolist() for each in ids] == [[0, 7]] * num_ranks


def test_messages_go_by_gloo(folder: Path) -> None:
    """Shared memory is that of CPUs."""
    with capture_logs() as logs, rank_threads(2, connect_devices=connect_gloo) as ranks:
        assert [group.shared for group in ranks.groups] == [None, None]
    assert not [entry for entry in logs if entry["event"] == "exchanges between ranks"]
