"""What a plan can do wrong, by name."""

from dataclasses import dataclass
from enum import StrEnum

from worker_svc.plans import PlanError


class Rule(StrEnum):
    """The rules that plans keep."""

    ORDER = "epochs never fall and steps rise"
    RELEASE = "only a held row is released, and once"
    ADMISSION = "only a free row is admitted, and once"
    SCHEDULE = "a row is scheduled once in a step"
    NULL_BLOCK = "block 0 is given to nobody"
    BLOCK_RANGE = "block ids are those of the pool"
    FRESH_BLOCK = "a fresh block stands in no other table"
    SHARED_BLOCK = "a block in two tables is not written"
    SLOT = "a slot is written once in a step"
    UNWRITTEN = "no slot is read that nobody wrote"
    FOREIGN = "no slot is read that holds another prefix"
    SWAP_DIRECTION = "a plan does not swap out and in"
    MOVE_TARGET = "a block is moved once, and to nobody who runs on it"
    UNWRITTEN_HOST = "no host block is read that nobody wrote"
    TABLES = "what the tables refuse"


@dataclass(frozen=True)
class Place:
    """Where it happened, as far as it can be said."""

    row: int | None = None
    slot: int | None = None
    block: int | None = None

    def __str__(self) -> str:
        named = (("row", self.row), ("block", self.block), ("slot", self.slot))
        return "".join(f", {name} {number}" for name, number in named if number is not None)


class Violation(PlanError):
    """A plan that broke a rule; it says which, in which step and where."""

    def __init__(self, step: int, rule: Rule, place: Place, detail: str) -> None:
        super().__init__(f"step {step}{place}: {detail} (rule: {rule.value})")
        self.step = step
        self.rule = rule
        self.row = place.row
        self.slot = place.slot
        self.block = place.block
