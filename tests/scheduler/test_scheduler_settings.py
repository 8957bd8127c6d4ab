"""Invalid settings stop the process with the value in the message."""

import re
from pathlib import Path

import pytest
from certificates import make_certificates
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
        ("workers", "::1:50053"),
        ("advertise", "fd00::1:50052"),
        ("advertise", "[10.0.0.256.1]:50052"),
        ("redis_url", "garbage"),
        ("redis_url", "http://redis:6379"),
        ("watermark", "1.0"),
        ("max_num_seqs", "0"),
        # Redis has no expiry of such a length, or each renewal would be late.
        ("lease_s", "inf"),
        ("lease_s", "1e308"),
        ("lease_s", "1e-9"),
        ("finished_ttl_s", "99999999999999999999"),
        ("step_timeout_s", "1e-9"),
    ],
)
def test_an_invalid_value_is_refused(field: str, value: str) -> None:
    settings = {"redis_url": "redis://redis:6379", "workers": "worker:50053", field: value}
    with pytest.raises(ValidationError, match=field):
        SchedulerSettings.model_validate(settings)


def test_a_file_of_tls_to_redis_that_cannot_be_read_is_refused_with_its_name() -> None:
    for query in ("ssl_ca_certs=/absent.pem", "ssl_certfile=/absent.pem&ssl_keyfile=/k.pem"):
        url = f"rediss+cluster://one:1,two:2?{query}"
        with pytest.raises(ValidationError, match=r"redis_url\n.*/absent\.pem"):
            SchedulerSettings.model_validate({"redis_url": url, "workers": "worker:50053"})


def test_workers_are_a_list_of_addresses() -> None:
    settings = SchedulerSettings.model_validate(
        {"redis_url": "unix:///r.sock", "workers": "worker:50053, [::1]:7,[fe80::1%eth0]:8,unix:/w"}
    )
    expected = ("worker:50053", "[::1]:7", "[fe80::1%eth0]:8", "unix:/w")
    assert settings.worker_addresses == expected


def test_a_manifest_may_put_any_address_in_brackets() -> None:
    for given, expected in (("[10.0.0.1]:1", "10.0.0.1:1"), ("[fd00::1]:1", "[fd00::1]:1")):
        values = {"redis_url": "unix:///r.sock", "workers": "worker:50053", "advertise": given}
        assert SchedulerSettings.model_validate(values).advertise == expected


def test_files_of_tls_are_checked_at_the_start_alone(tmp_path: Path) -> None:
    ca = make_certificates(tmp_path) / "ca.pem"
    values = {"redis_url": "unix:///r.sock", "workers": "worker:50053"}
    settings = SchedulerSettings.model_validate({**values, "worker_tls_ca": ca, "peer_tls_ca": ca})
    # A renewal, in which a later term begins.
    ca.unlink()
    assert settings.worker_tls is not None
    assert settings.peer_tls is not None


def with_password(file: Path, url: str = "redis://redis:6379/0") -> SchedulerSettings:
    return SchedulerSettings.model_validate(
        {"redis_url": url, "workers": "worker:50053", "redis_password_file": file}
    )


def test_the_password_is_the_only_line_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("s3cret/with:@signs\n")
    settings = with_password(file)
    assert settings.redis_password == "s3cret/with:@signs"
    # Also for a shard that is led later.
    file.unlink()
    assert settings.redis_password == "s3cret/with:@signs"


@pytest.mark.parametrize("text", ["", "\n", "one\ntwo\n", "\nsecond\n"])
def test_a_file_without_a_password_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "password"
    file.write_text(text)
    with pytest.raises(ValidationError, match=r"redis_password_file\n.*its only line"):
        with_password(file)


def test_a_password_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="No such file"):
        with_password(tmp_path / "absent")


def test_a_second_password_in_the_url_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("one\n")
    with pytest.raises(ValidationError, match="remove one of them"):
        with_password(file, "redis://:two@redis:6379/0")


def test_flags_and_variables_take_the_choices_that_the_help_lists(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    required = ["--redis-url=redis://redis:6379", "--workers=worker:50053"]
    with pytest.raises(SystemExit):
        SchedulerSettings.load(["--help"])
    listed = dict(re.findall(r"^  --([a-z-]+) \{(.+)\}", capsys.readouterr().out, re.MULTILINE))
    assert {"batch-policy", "preemption-mode", "placement"} <= listed.keys()
    for flag, choices in listed.items():
        field = flag.replace("-", "_")
        for choice in choices.split(","):
            by_flag = SchedulerSettings.load([*required, f"--{flag}={choice}"])
            with monkeypatch.context() as variables:
                variables.setenv(f"QUIRE_SCHEDULER_{field.upper()}", choice)
                by_variable = SchedulerSettings.load(required)
            assert getattr(by_flag, field) == getattr(by_variable, field) == choice
