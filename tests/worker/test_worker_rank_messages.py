"""What rank 0 sends, and that the others follow: block moves, prompts' log-probabilities, drafts.
Ranks are threads here."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_runners import check_equal_outputs, decoded, follower_of, outputs_of, runner_of
from rank_threads import rank_threads
from shard_models import prepared
from tiny_models import VOCAB_SIZE, llama, save_model
from torch import Tensor

from worker_svc.ranks.leader import Leader
from worker_svc.ranks.messages import Kind, Messages
from worker_svc.runner.step_runner import StepRunner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(llama(), tmp_path_factory.mktemp("llama"))


@contextmanager
def two_ranks(model: Path, *, drafts: int = 0) -> Iterator[StepRunner]:
    """The runner of rank 0, which rank 1 follows."""
    with rank_threads(2) as ranks, ThreadPoolExecutor(1) as threads:
        first, second = (prepared(model, group) for group in ranks.groups)
        following = threads.submit(follower_of(second, ranks.groups[1]).run)
        leader = Leader(ranks.groups[0])
        yield runner_of(first, leader, drafts=drafts)
        leader.stop()
        following.result(timeout=10)


def test_followers_move_blocks_and_compute_prompt_logprobs(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Slices of three tokens.
    monkeypatch.setattr("worker_svc.runner.prompt_slices._SLICE_BYTES", 3 * 4 * VOCAB_SIZE)
    expected = outputs_of(runner_of(prepared(model), None))
    with two_ranks(model) as runner:
        found = outputs_of(runner)
    check_equal_outputs(found, expected)


def test_rank_0_speculates_by_prompt_lookup(model: Path) -> None:
    expected = decoded(runner_of(prepared(model), None), 20)
    with two_ranks(model, drafts=3) as runner:
        assert decoded(runner, 20) == expected


class Line:
    """A broadcast from one `Messages` to another."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []

    def send(self, parts: Iterable[Tensor]) -> None:
        self.parts += [part.clone() for part in parts]

    def receive(self, parts: Iterable[Tensor]) -> None:
        for part in parts:
            part.copy_(self.parts.pop(0))


@pytest.mark.parametrize("num_words", [0, 1, 100, 4078, 4079, 100_000])
def test_messages_of_all_sizes(num_words: int) -> None:
    draw, line = np.random.default_rng(0), Line()
    arrays = [draw.integers(0, 2**31 - 1, num_words), np.arange(12, dtype=np.int32).reshape(3, 4)]
    sending, receiving = Messages(line.send), Messages(line.receive)
    for _ in range(2):
        sending.send(Kind.LOGITS, arrays)
        message = receiving.receive()
        assert message.kind is Kind.LOGITS
        for found, sent in zip(message.arrays, arrays, strict=False):
            assert np.array_equal(found, sent)
        assert all(not len(rest) for rest in message.arrays[2:])
    assert line.parts == []


def test_a_failing_pass_is_a_lost_rank(model: Path) -> None:
    lost: list[str] = []

    class Group:
        rank = 0

        def broadcast(self, parts: Iterable[Tensor]) -> None: ...

        def lost(self, reason: str) -> None:
            lost.append(reason)

    leader = Leader(Group())  # type: ignore[arg-type]
    with pytest.raises(IndexError), leader.in_step():
        raise IndexError("a token out of range")
    assert lost == ["rank 0 failed in a forward pass: a token out of range"]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_equal_on_all_ranks(num_ranks: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(5, 7, generator=generator).to(dtype) for _ in range(num_ranks)]
    expected = torch.stack(parts).float().sum(0)
    with rank_threads(num_ranks) as ranks:
        # Of a view, which is not contiguous.
        found = ranks.run(lambda rank: ranks.groups[rank].sum(parts[rank].clone().T))
    for one in found:
        assert torch.equal(one, found[0])
        assert torch.allclose(one.T.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("num_columns", [6, 5, 4, 3])
def test_columns_are_gathered_in_the_order_of_ranks(num_columns: int) -> None:
    with rank_threads(3) as ranks:
        part = torch.ones(2, 2)
        found = ranks.run(lambda rank: ranks.groups[rank].gather(part * rank, num_columns))
    assert found[0].tolist() == [[0, 0, 1, 1, 2, 2][:num_columns]] * 2
    assert found[0].is_contiguous()


def test_the_least_of_all_ranks() -> None:
    with rank_threads(3) as ranks:
        found = ranks.run(lambda rank: ranks.groups[rank].smallest([5 + rank, 9 - rank]))
    assert found == [[5, 7]] * 3
