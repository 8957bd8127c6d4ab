"""The runner of rank 0 and its followers, in one process."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from draft_models import FREE
from rank_threads import rank_threads
from shard_models import prepared
from worker_driver import BLOCK_SIZE, Sampling, Sequence, admit, schedule, worker_settings

from quire.internal.v1 import worker_pb2
from worker_svc.cache.kv_pool import KvPool
from worker_svc.cache.pool_size import PoolSize
from worker_svc.loading.drafter_loading import load_draft_model, make_drafter
from worker_svc.loading.model_preparation import PreparedModel
from worker_svc.loading.startup import start_runner
from worker_svc.model.load_progress import LoadProgress
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.plan.plans import StepOutput, plan_from_proto
from worker_svc.plan.tables import RowTables
from worker_svc.ranks.follower import Follower
from worker_svc.ranks.group import RankGroup
from worker_svc.ranks.leader import Leader, LeadingModel
from worker_svc.runner.step_runner import StepRunner

SIZE: Final = PoolSize(20, 8)
_CPU: Final = torch.device("cpu")
_PROMPT: Final = [5, 17, 99, 3, 42, 8, 150, 61, 7, 7, 23]
_SEED: Final = 3


def runner_of(
    one: PreparedModel,
    leader: Leader | None,
    *,
    drafts: int = 0,
    draft_model: Path | None = None,
) -> StepRunner:
    """`drafts` are those of a draft model, if there is one, whose passes cost next to nothing, else
    of prompt lookup."""
    settings = worker_settings(
        one.model.weights[0].parent,
        dtype="float32",
        speculative_model=None if draft_model is None else str(draft_model),
        num_speculative_tokens=drafts,
        weight_cache_size=0,
    )
    draft, layers = load_draft_model(settings, one.model, _CPU, LoadProgress()), one.model.layers
    if draft is not None:
        draft = replace(draft, price=FREE)
        layers = layers + draft.cached.layers
    moves = None if leader is None else leader.send_moves
    pool = KvPool(layers, SIZE, BLOCK_SIZE, _CPU, moves)
    attention = PagedAttention(pool.layers[: len(one.model.layers)], one.implementation)
    one.model.set_attention(attention)
    model, begin_logits = one.model, None
    if leader is not None:
        model = leading = LeadingModel(one.model, attention, leader)
        begin_logits = leading.begin_logits if leader.has_stages else None
    tables = RowTables(
        max_num_seqs=4,
        max_model_len=model.max_model_len,
        block_size=BLOCK_SIZE,
        num_blocks=SIZE.num_blocks,
        max_num_batched_tokens=64,
    )
    return start_runner(
        model,
        pool,
        attention,
        tables,
        one.implementation,
        enforce_eager=True,
        drafter=make_drafter(settings, draft, pool, tables, one.implementation),
        begin_logits=begin_logits,
    )


def follower_of(one: PreparedModel, group: RankGroup) -> Follower:
    pool = KvPool(one.model.layers, SIZE, BLOCK_SIZE, _CPU)
    attention = PagedAttention(pool.layers, one.implementation)
    one.model.set_attention(attention)
    return Follower(one.model, pool, attention, group)


@contextmanager
def staged(
    model: Path, num_ranks: int = 2, drafts: int = 0, draft_model: Path | None = None
) -> Iterator[StepRunner]:
    """The runner of rank 0 of two stages."""
    with rank_threads(num_ranks, 2) as ranks, ThreadPoolExecutor(num_ranks) as threads:
        first, *others = (prepared(model, group) for group in ranks.groups)
        following = [
            threads.submit(follower_of(one, group).run)
            for one, group in zip(others, ranks.groups[1:], strict=True)
        ]
        leader = Leader(ranks.groups[0])
        try:
            yield runner_of(first, leader, drafts=drafts, draft_model=draft_model)
        finally:
            leader.stop()
        for one in following:
            one.result(timeout=10)


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


def check_equal_outputs(found: Iterable[StepOutput], expected: Iterable[StepOutput]) -> None:
    """Of `outputs_of`: equal tokens, and log-probabilities of the same tokens of the prompt."""
    prompts = []
    for one, other in zip(found, expected, strict=True):
        assert one.sampled_token_ids == other.sampled_token_ids
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
        if one.prompt_logprobs is not None and other.prompt_logprobs is not None:
            prompts.append((one.prompt_logprobs.packed, other.prompt_logprobs.packed))
    assert prompts
    ids = [np.frombuffer(packed, "<u4").reshape(-1, 3)[:, 0] for packed in prompts[0]]
    assert (ids[0] == ids[1]).all()
