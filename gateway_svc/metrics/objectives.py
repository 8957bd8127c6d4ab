"""Service-level objectives of latency, by class of tenants."""

import math
import re
from dataclasses import dataclass
from typing import Final

from gateway_svc.access.tenant import DEFAULT_CLASS, TENANT_CLASS

_OBJECTIVE: Final = re.compile(rf"(?P<name>{TENANT_CLASS})=(?P<first>[^:]+):(?P<next>[^:]+)")


@dataclass(frozen=True, slots=True)
class Objective:
    """What a request has to keep to count as goodput."""

    # From its arrival.
    time_to_first_token_s: float
    # The mean of each of its choices.
    inter_token_latency_s: float


@dataclass(frozen=True, slots=True)
class Objectives:
    """Objectives by class; a class without its own has those of the default one."""

    by_class: dict[str, Objective]

    def of(self, tenant_class: str) -> Objective:
        return self.by_class.get(tenant_class) or self.by_class[DEFAULT_CLASS]


def parse_objectives(text: str) -> Objectives:
    """Parse `CLASS=TTFT:ITL`, in seconds, separated by commas. ValueError with the wrong part."""
    by_class: dict[str, Objective] = {}
    for part in text.split(","):
        found = _OBJECTIVE.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{part.strip()!r} is not CLASS=TTFT:ITL, such as default=2:0.2")
        if found["name"] in by_class:
            raise ValueError(f"class {found['name']!r} is given twice")
        by_class[found["name"]] = Objective(_seconds(found["first"]), _seconds(found["next"]))
    if DEFAULT_CLASS not in by_class:
        raise ValueError(f"the class {DEFAULT_CLASS!r} is needed")
    return Objectives(by_class)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{text!r} is not a number of seconds above 0")
    return seconds
