"""Plans for a simulated worker in this process, and what it makes of them."""

from collections.abc import Sequence as Items

import pytest
from faulty_sim_runner import FaultySimRunner
from worker_driver import Sampling, Sequence, admit, append, schedule

from quire.internal.v1 import worker_pb2
from worker_svc.plan.plans import StepOutput, plan_from_proto
from worker_svc.sim.runner import SimModel
from worker_svc.sim.violations import Rule, Violation

# 7 blocks to hand out, of 4 slots; 16 tokens at most in a sequence.
SMALL = SimModel(
    vocab_size=1000,
    max_model_len=16,
    block_size=4,
    num_blocks=8,
    num_host_blocks=3,
    max_num_seqs=4,
    max_num_batched_tokens=12,
)


class SimDriver:
    """Runs one plan after the other; every argument is a part of the plan.

    An admission is (row, token ids, number of computed tokens, block ids).
    """

    def __init__(self, model: SimModel = SMALL) -> None:
        self.runner = FaultySimRunner(model)
        self.step = 0

    def run(
        self,
        *,
        release: Items[int] = (),
        admissions: Items[tuple[int, list[int], int, list[int]]] = (),
        appends: Items[tuple[int, list[int]]] = (),
        swap_outs: Items[tuple[int, int]] = (),
        swap_ins: Items[tuple[int, int]] = (),
        copies: Items[tuple[int, int]] = (),
        scheduled: Items[tuple[int, int]] = (),
        seed: int = 0,
        num_logprobs: int = 0,
        lookahead: int = 0,
        epoch: int = 1,
        step: int | None = None,
    ) -> StepOutput:
        self.step = self.step + 1 if step is None else step
        plan = worker_pb2.BatchPlan(epoch=epoch, step=self.step, released_rows=release)
        sampling = Sampling(seed=seed, num_logprobs=num_logprobs)
        for row, tokens, num_computed, blocks in admissions:
            admit(plan, Sequence(row, tokens, len(tokens), num_computed, blocks, sampling))
        for row, blocks in appends:
            append(plan, row, blocks)
        for row, count in scheduled:
            schedule(plan, row, count)
            plan.schedule.num_lookahead_tokens.append(lookahead)
        for moves, pairs in (
            (plan.swap_outs, swap_outs),
            (plan.swap_ins, swap_ins),
            (plan.copies, copies),
        ):
            moves.sources.extend(source for source, _ in pairs)
            moves.destinations.extend(destination for _, destination in pairs)
        return self.runner.run(plan_from_proto(plan))

    def refuses(self, rule: Rule, **plan: object) -> Violation:
        """The violation, which the KV checker has kept."""
        with pytest.raises(Violation) as caught:
            self.run(**plan)  # type: ignore[arg-type]
        assert caught.value.rule is rule, caught.value
        assert caught.value.step == self.step
        assert self.runner.kv_checker.violations[-1] is caught.value
        return caught.value
