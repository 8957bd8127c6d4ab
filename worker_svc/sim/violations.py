"""The rules that plans must keep, and the error for a plan that breaks one."""

from enum import StrEnum

from worker_svc.plan.plans import PlanError


class Rule(StrEnum):
    """The rules that plans must keep."""

    ORDER = "epochs never fall and steps rise"
    RELEASE = "only a held row is released, and once"
    ADMISSION = "only a free row is admitted, and once"
    SCHEDULE = "a row is scheduled once in a step"
    NULL_BLOCK = "block 0 is never allocated"
    BLOCK_RANGE = "block ids are those of the pool"
    FRESH_BLOCK = "a fresh block is in no other table"
    SHARED_BLOCK = "a block in two tables is not written"
    SLOT = "a slot is written once in a step"
    UNWRITTEN = "only written slots are read"
    FOREIGN = "no slot is read that holds another prefix"
    SWAP_DIRECTION = "a plan does not swap out and in"
    MOVE_TARGET = "a block is moved once, and never onto a block in use"
    UNWRITTEN_HOST = "only written host blocks are read"
    TABLES = "the tables accept the plan"


class Violation(PlanError):
    """A plan that broke a rule. Row, block and slot are None where they do not apply."""

    def __init__(
        self,
        step: int,
        rule: Rule,
        detail: str,
        *,
        row: int | None = None,
        block: int | None = None,
        slot: int | None = None,
    ) -> None:
        named = (("row", row), ("block", block), ("slot", slot))
        place = "".join(f", {name} {number}" for name, number in named if number is not None)
        super().__init__(f"step {step}{place}: {detail} (rule: {rule.value})")
        self.step = step
        self.rule = rule
        self.row = row
        self.block = block
        self.slot = slot
