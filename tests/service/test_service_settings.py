from pathlib import Path

import pytest
from certificates import make_certificates
from pydantic_settings import SettingsConfigDict

from quire.service.addresses import Address
from quire.service.settings import ServiceSettings
from quire.service.tls import ServerTLS


class ExampleSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="QUIRE_EXAMPLE_", cli_prog_name="quire-example")

    listen: Address
    revision: str | None = None


def refusal(flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        ExampleSettings.load(flags)
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:99999"])
def test_a_wrong_address_stops_the_process(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal([f"--listen={address}"], capsys)
    assert message.startswith("quire-example: --listen / QUIRE_EXAMPLE_LISTEN: must ")
    assert f"(got '{address}')" in message


def test_a_password_is_in_no_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "(got 'redsi://u:***@h:1')" in refusal(["--listen=redsi://u:s3c/r@et@h:1"], capsys)
    monkeypatch.setenv("QUIRE_EXAMPLE_REDIS_PASSWORD", "s3cret")
    message = refusal(["--listen=a:1"], capsys)
    assert message == "quire-example: QUIRE_EXAMPLE_REDIS_PASSWORD: no such setting\n"


def test_a_missing_setting_is_named_without_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal([], capsys)
    assert message == "quire-example: --listen / QUIRE_EXAMPLE_LISTEN: Field required\n"


@pytest.mark.parametrize("name", ["address_file", "tls_cert", "revision"])
def test_an_empty_variable_is_no_path_and_no_name(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variable = f"QUIRE_EXAMPLE_{name.upper()}"
    monkeypatch.setenv(variable, "")
    message = refusal(["--listen=a:1"], capsys)
    assert f"{variable}: must not be empty; leave it out for the default (got '')" in message


def test_a_log_level_may_be_written_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ExampleSettings.load(["--listen=a:1", "--log-level=WARNING"]).log_level == "warning"
    monkeypatch.setenv("QUIRE_EXAMPLE_LOG_LEVEL", "Debug")
    assert ExampleSettings.load(["--listen=a:1"]).log_level == "debug"


def test_settings_of_tls_are_checked_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_certificates(tmp_path / "certificates")
    cert, key = f"--tls-cert={folder / 'gateway.pem'}", f"--tls-key={folder / 'gateway-key.pem'}"
    settings = ExampleSettings.load(["--listen=a:1", cert, key])
    assert settings.server_tls == ServerTLS(folder / "gateway.pem", folder / "gateway-key.pem")
    assert settings.server_certificates() is not None
    for flags, message in (
        ([cert], "--tls-cert needs --tls-key"),
        ([key], "--tls-key and --tls-client-ca need --tls-cert"),
        ([cert, f"--tls-key={tmp_path / 'none'}"], f"{tmp_path / 'none'} cannot be read"),
    ):
        assert message in refusal(["--listen=a:1", *flags], capsys)
