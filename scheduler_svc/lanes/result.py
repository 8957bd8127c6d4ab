"""A worker's result, checked before it is believed."""

from quire.internal.v1 import worker_pb2
from scheduler_svc.lanes.rows import Rows
from scheduler_svc.lanes.stream import LaneLost


def check_result(result: worker_pb2.StepResult, plan: worker_pb2.BatchPlan, rows: Rows) -> None:
    """LaneLost unless each row that was due a token has one, or a reason why not."""
    if (result.epoch, result.step) != (plan.epoch, plan.step):
        raise LaneLost(
            f"the worker answered step {result.step} of epoch {result.epoch}, "
            f"not step {plan.step} of epoch {plan.epoch}"
        )
    due = {row for row in plan.schedule.rows if rows[row].is_computed}
    failing = {failure.row for failure in result.failures}
    sampled = sorted(result.sampled_rows)
    if sampled != sorted(due - failing) or len(sampled) != len(result.sampled_token_ids):
        raise LaneLost(f"the worker's result of step {result.step} is not that of its plan")
    if not failing <= set(plan.schedule.rows):
        raise LaneLost(f"the worker failed rows that step {result.step} did not run")
