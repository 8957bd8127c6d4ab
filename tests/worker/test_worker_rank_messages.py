"""What rank 0 sends, and that the others follow: block moves, prompts' log-probabilities, drafts.
Ranks are threads here."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_threads import rank_threads
from tiny_models import VOCAB_SIZE, llama, save_model
from torch import Tensor
from worker_driver import BLOCK_SIZE, Sampling, Sequence, admit, schedule, worker_settings

from quire.internal.v1 import worker_pb2
from worker_svc.cache.kv_pool import KvPool
from worker_svc.cache.pool_size import PoolSize
from worker_svc.model.load_progress import LoadProgress
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.plan.plans import StepOutput, plan_from_proto
from worker_svc.plan.tables import RowTables
from worker_svc.ranks.follower import Follower
from worker_svc.ranks.group import RankGroup
from worker_svc.ranks.leader import Leader, LeadingModel
from worker_svc.ranks.messages import Kind, Messages
from worker_svc.runner.model_preparation import PreparedModel, prepare_model
from worker_svc.runner.startup import start_runner
from worker_svc.runner.step_runner import StepRunner
from worker_svc.speculation.prompt_lookup import PromptLookup

_CPU = torch.device("cpu")
_SIZE = PoolSize(20, 8)
_PROMPT = [5, 17, 99, 3, 42, 8, 150, 61, 7, 7, 23]
_SEED = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(llama(), tmp_path_factory.mktemp("llama"))


def prepared(model: Path, group: RankGroup | None = None) -> PreparedModel:
    settings = worker_settings(model, dtype="float32", device="cpu")
    return prepare_model(settings, _CPU, LoadProgress(), group)


def runner_of(one: PreparedModel, leader: Leader | None, *, drafts: int = 0) -> StepRunner:
    moves = None if leader is None else leader.send_moves
    pool = KvPool(one.model.layers, _SIZE, BLOCK_SIZE, _CPU, moves)
    attention = PagedAttention(pool.layers, one.implementation)
    one.model.set_attention(attention)
    model = one.model if leader is None else LeadingModel(one.model, attention, leader)
    tables = RowTables(
        max_num_seqs=4,
        max_model_len=model.max_model_len,
        block_size=BLOCK_SIZE,
        num_blocks=_SIZE.num_blocks,
        max_num_batched_tokens=64,
    )
    drafter = PromptLookup(drafts, tables, one.implementation) if drafts else None
    return start_runner(
        model, pool, attention, tables, one.implementation, enforce_eager=True, drafter=drafter
    )


def follower_of(one: PreparedModel, group: RankGroup) -> Follower:
    pool = KvPool(one.model.layers, _SIZE, BLOCK_SIZE, _CPU)
    attention = PagedAttention(pool.layers, one.implementation)
    one.model.set_attention(attention)
    return Follower(one.model, pool, attention, group)


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


def outputs_of(runner: StepRunner) -> list[StepOutput]:
    """A prompt, a fork that copies its last block, a row that is swapped out and in again."""
    outputs: list[StepOutput] = []

    def run(plan: worker_pb2.BatchPlan) -> int:
        plan.step = len(outputs) + 1
        outputs.append(runner.launch(plan_from_proto(plan)).output())
        return outputs[-1].sampled_token_ids[-1] if outputs[-1].sampled_token_ids else -1

    def admitted(
        row: int, tokens: list[int], num_computed: int, blocks: list[int], num_prompt: int = 0
    ) -> worker_pb2.BatchPlan:
        sampling = Sampling(1.0, seed=_SEED + row, num_prompt_logprobs=num_prompt)
        plan = worker_pb2.BatchPlan()
        admit(plan, Sequence(row, tokens, len(_PROMPT), num_computed, blocks, sampling))
        schedule(plan, row, len(tokens) - num_computed)
        return plan

    run(admitted(0, _PROMPT, 0, [1, 2, 3], num_prompt=3))
    fork = admitted(1, _PROMPT, len(_PROMPT) - 1, [1, 2, 4])
    fork.copies.sources.append(3)
    fork.copies.destinations.append(4)
    token = run(fork)
    swap = worker_pb2.BatchPlan(released_rows=[0, 1])
    swap.swap_outs.sources.extend([1, 2, 4])
    swap.swap_outs.destinations.extend([5, 6, 7])
    run(swap)
    back = admitted(2, [*_PROMPT, token], len(_PROMPT), [9, 8, 7])
    back.swap_ins.sources.extend([5, 6, 7])
    back.swap_ins.destinations.extend([9, 8, 7])
    run(back)
    return outputs


def test_followers_move_blocks_and_compute_prompt_logprobs(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Slices of three tokens.
    monkeypatch.setattr("worker_svc.runner.prompt_slices._SLICE_BYTES", 3 * 4 * VOCAB_SIZE)
    expected = outputs_of(runner_of(prepared(model), None))
    with two_ranks(model) as runner:
        found = outputs_of(runner)
    for one, other in zip(found, expected, strict=True):
        assert one.sampled_token_ids == other.sampled_token_ids
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
    first, reference = found[0].prompt_logprobs, expected[0].prompt_logprobs
    assert first is not None
    assert reference is not None
    ids = [np.frombuffer(x.packed, "<u4").reshape(-1, 3)[:, 0] for x in (first, reference)]
    assert (ids[0] == ids[1]).all()


def decoded(runner: StepRunner, num_tokens: int) -> list[int]:
    """The greedy tokens of one row with look-ahead."""
    prompt = [5, 6, 7, 8] * 4
    plan = worker_pb2.BatchPlan(step=1)
    blocks = list(range(1, 12))
    admit(plan, Sequence(0, list(prompt), len(prompt), 0, blocks))
    schedule(plan, 0, len(prompt))
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        plan.schedule.num_lookahead_tokens.append(4)
        output = runner.launch(plan_from_proto(plan)).output()
        tokens += output.sampled_token_ids
        plan = worker_pb2.BatchPlan(step=plan.step + 1)
        schedule(plan, 0, 1)
    return tokens[:num_tokens]


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
