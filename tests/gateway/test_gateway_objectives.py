"""Latency objectives by class of tenants, as the setting gives them."""

import re

import pytest

from gateway_svc.metrics.objectives import Objective, parse_objectives


def test_a_class_without_objectives_has_those_of_the_default_one() -> None:
    objectives = parse_objectives("default=2:0.2, batch=60:1.5")
    assert objectives.of("batch") == Objective(60, 1.5)
    assert objectives.of("other") == objectives.of("default") == Objective(2, 0.2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'' is not CLASS=TTFT:ITL"),
        ("2:0.2", "'2:0.2' is not CLASS=TTFT:ITL"),
        ("default=2", "'default=2' is not CLASS=TTFT:ITL"),
        ("Default=2:1", "'Default=2:1' is not CLASS=TTFT:ITL"),
        ("default=2:fast", "'fast' is not a number of seconds above 0"),
        ("default=0:1", "'0' is not a number of seconds above 0"),
        ("default=inf:1", "'inf' is not a number of seconds above 0"),
        ("batch=2:1", "the class 'default' is needed"),
        ("default=2:1,default=3:1", "class 'default' is given twice"),
    ],
)
def test_objectives_that_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        parse_objectives(text)
