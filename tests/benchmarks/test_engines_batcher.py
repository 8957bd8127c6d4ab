"""The minimal scheduler's plans, checked by the simulated worker's KV checker."""

import itertools

import pytest

from benchmarks.engines.batcher import Step, steps
from benchmarks.engines.models import LARGE, SMALL
from benchmarks.engines.workload import MAX_MODEL_LEN, Work, workload
from worker_svc.plan.plans import plan_from_proto
from worker_svc.sim.runner import SimModel, SimRunner

WORK = Work(
    prompts=[list(range(1, 1 + length)) for length in (5, 30, 1, 12, 8, 3)],
    num_outputs=[4, 1, 9, 2, 5, 3],
)
MODEL = SimModel(max_num_seqs=3, max_num_batched_tokens=10, block_size=4, num_blocks=40)


def run(work: Work, model: SimModel) -> tuple[list[list[int]], list[Step]]:
    """What the simulated worker gives; it raises for a plan that breaks a rule."""
    runner = SimRunner(model)
    outputs: list[list[int]] = [[] for _ in work.prompts]
    taken = list(
        steps(
            work,
            max_num_seqs=model.max_num_seqs,
            max_num_batched_tokens=model.max_num_batched_tokens,
            block_size=model.block_size,
            num_blocks=model.num_blocks,
        )
    )
    for step in taken:
        output = runner.run(plan_from_proto(step.plan))
        assert sorted(output.sampled_rows) == sorted(step.sampling)
        for row, token_id in zip(output.sampled_rows, output.sampled_token_ids, strict=True):
            outputs[step.sampling[row]].append(token_id)
    assert not runner.kv_checker.violations
    return outputs, taken


def test_every_request_gets_its_tokens_and_plans_are_valid():
    outputs, _ = run(WORK, MODEL)
    assert [len(output) for output in outputs] == WORK.num_outputs


def test_tokens_do_not_depend_on_rows_and_budget():
    expected, _ = run(WORK, MODEL)
    for rows, budget in itertools.product((1, 2, 6), (6, 7, 64)):
        model = SimModel(
            max_num_seqs=rows, max_num_batched_tokens=budget, block_size=4, num_blocks=40
        )
        assert run(WORK, model)[0] == expected


def test_steps_respect_rows_and_budget_and_the_last_one_only_releases():
    _, taken = run(WORK, MODEL)
    assert max(step.num_scheduled_tokens for step in taken) == MODEL.max_num_batched_tokens
    assert max(len(step.plan.schedule.rows) for step in taken) == MODEL.max_num_seqs
    assert not taken[-1].plan.schedule.rows
    assert sum(len(step.plan.released_rows) for step in taken) == len(WORK.prompts)


def test_decodes_precede_chunks_of_prompts():
    """One request decodes while the prompt of the other takes three steps."""
    work = Work([[1], list(range(1, 28))], [9, 1])
    _, taken = run(work, MODEL)
    assert [len(step.sampling) for step in taken[:4]] == [1, 1, 2, 1]


def test_a_pool_that_is_too_small_is_an_error():
    with pytest.raises(ValueError, match="too small"):
        run(WORK, SimModel(max_num_seqs=3, max_num_batched_tokens=64, block_size=4, num_blocks=9))


def test_the_work_is_the_published_one():
    work = Work.of(workload(64))
    assert len(work.prompts) == 64
    assert {len(prompt) for prompt in work.prompts} <= set(range(64, 257))
    assert work.num_output_tokens == 4023
    assert max(map(len, work.prompts)) + max(work.num_outputs) <= MAX_MODEL_LEN
    assert Work.of_json(vars(work)) == work


def test_models_have_the_stated_sizes():
    assert SMALL.num_parameters == pytest.approx(30e6, rel=0.05)
    assert LARGE.num_parameters == pytest.approx(110e6, rel=0.05)


def test_flops_are_two_per_parameter_and_token_with_the_head_for_sampled_tokens_only():
    head = SMALL.vocab_size * SMALL.hidden_size
    assert SMALL.flops(1, 1) == 2 * SMALL.num_parameters
    assert SMALL.flops(10, 0) == 20 * (SMALL.num_parameters - head)
