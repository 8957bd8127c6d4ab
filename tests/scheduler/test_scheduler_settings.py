"""Invalid settings stop the process with the value in the message."""

import pytest
from pydantic import ValidationError

from scheduler_svc.settings import SchedulerSettings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("workers", ""),
        ("workers", "worker"),
        ("workers", "worker:99999"),
        ("workers", "worker:0"),
        ("workers", "a..b:50053"),
        ("workers", "x" * 64 + ":50053"),
        ("workers", "a:1,,b:1"),
        ("redis_url", "garbage"),
        ("redis_url", "http://redis:6379"),
        ("watermark", "1.0"),
        ("max_num_seqs", "0"),
    ],
)
def test_an_invalid_value_is_refused(field: str, value: str) -> None:
    settings = {"redis_url": "redis://redis:6379", "workers": "worker:50053", field: value}
    with pytest.raises(ValidationError, match=field):
        SchedulerSettings.model_validate(settings)


def test_workers_are_a_list_of_addresses() -> None:
    settings = SchedulerSettings.model_validate(
        {"redis_url": "unix:///r.sock", "workers": "worker:50053, [::1]:7,unix:/w.sock"}
    )
    assert settings.worker_addresses == ("worker:50053", "[::1]:7", "unix:/w.sock")
