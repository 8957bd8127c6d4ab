"""The admissions of a plan: values of requests that the scheduler forwards unread."""

from array import array

import pytest
from bare_groups import bare_group

from scheduler_svc.core.request import Params
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.lane.plan import PlanContents


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ([b"", b""], []),
        ([b"one", b"two"], [b"one", b"two"]),
        ([b"", b"", b"one", b""], [b"", b"", b"one", b""]),
    ],
)
def test_logits_params_are_sent_only_if_a_sequence_has_any(
    given: list[bytes], sent: list[bytes]
) -> None:
    contents = PlanContents()
    for row, logits_params in enumerate(given):
        params = Params(1.0, 0, 1.0, seed=row, max_tokens=1, logits_params=logits_params)
        group = bare_group(str(row), params)
        sequence = Sequence(row, group, 0, array("I", [7]), num_prompt_tokens=1, num_tokens=1)
        group.sequences, sequence.row = [sequence], row
        contents.admit(sequence)
    assert list(contents.admissions.logits_params) == sent
