"""A step's decision as the message that a worker reads."""

from collections.abc import Iterable

from quire.internal.v1 import worker_pb2
from scheduler_svc.core.sequence import Sequence


def build_plan(
    epoch: int,
    step: int,
    released_rows: Iterable[int],
    admitted: Iterable[Sequence],
    appended: Iterable[tuple[int, tuple[int, ...]]],
    scheduled: Iterable[tuple[int, int]],
) -> worker_pb2.BatchPlan:
    """`appended`: (row, block ids); `scheduled`: (row, number of tokens).

    Admitted sequences have their row, block table and number of cached tokens set.
    """
    plan = worker_pb2.BatchPlan(epoch=epoch, step=step, released_rows=released_rows)
    for sequence in admitted:
        _admit(plan.admissions, sequence)
    for row, block_ids in appended:
        plan.appends.rows.append(row)
        plan.appends.block_ids.extend(block_ids)
        plan.appends.num_blocks.append(len(block_ids))
    for row, num_tokens in scheduled:
        plan.schedule.rows.append(row)
        plan.schedule.num_scheduled_tokens.append(num_tokens)
    return plan


def _admit(admissions: worker_pb2.Admissions, sequence: Sequence) -> None:
    assert sequence.row is not None
    params = sequence.params
    admissions.rows.append(sequence.row)
    admissions.token_ids.extend(sequence.token_ids)
    admissions.num_tokens.append(len(sequence.token_ids))
    admissions.num_prompt_tokens.append(sequence.num_prompt_tokens)
    admissions.num_computed_tokens.append(sequence.num_computed_tokens)
    admissions.block_ids.extend(sequence.block_ids)
    admissions.num_blocks.append(len(sequence.block_ids))
    admissions.temperatures.append(params.temperature)
    admissions.top_ks.append(params.top_k)
    admissions.top_ps.append(params.top_p)
    admissions.seeds.append(params.seed)
    admissions.num_logprobs.append(0)
    admissions.num_prompt_logprobs.append(0)
