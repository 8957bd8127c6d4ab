"""The flags of `quire serve`. Starting it is tested with the launcher."""

import contextlib
import subprocess
import sys
import warnings

import pytest
import typer
from typer.testing import CliRunner

from gateway_svc.settings import GatewaySettings
from quire.cli import app
from quire.cli.serve.command import listen_address
from quire.cli.serve.service_flags import with_service_flags
from quire.launcher.service_settings import service_settings
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings

CLASSES = {"gateway": GatewaySettings, "scheduler": SchedulerSettings, "worker": WorkerSettings}


def serve(*arguments: str):
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, ["serve", "model", *arguments])


def test_each_setting_is_a_flag_or_refused_with_a_reason():
    found = {(one.service, one.name): one for one in service_settings()}
    fields = {(service, name) for service, one in CLASSES.items() for name in one.model_fields}
    assert set(found) == fields
    listed = serve("--help-settings").stdout.split()
    for (service, name), setting in found.items():
        assert setting.flag == f"--{service}.{name.replace('_', '-')}"
        assert (setting.flag in listed) is (setting.reserved is None)


def test_a_setting_of_the_stack_itself_is_refused_with_the_reason():
    result = serve("--worker.model", "x")
    assert result.exit_code == 2
    assert "'--worker.model': serve sets it; use the argument MODEL" in result.stderr


def given(*arguments: str) -> dict[str, str]:
    """The settings that flags give, by variable."""
    taken: list[dict[str, str]] = []

    def take(settings: dict[str, str]) -> None:
        taken.append(settings)

    single = typer.Typer(add_completion=False)
    single.command()(with_service_flags(take, service_settings()))
    result = CliRunner().invoke(single, arguments)
    assert result.exit_code == 0, result.output
    return taken[0]


def test_flags_become_variables_of_the_services():
    assert given() == {}
    assert given(
        *("--gateway.max-live-calls", "5"),
        *("--scheduler.batch-policy", "prefill_first"),
        "--scheduler.no-enable-prefix-caching",
        "--worker.enforce-eager",
        *("--worker.kv-cache-memory", "1.5GiB"),
        *("--dtype", "float32"),
    ) == {
        "QUIRE_GATEWAY_MAX_LIVE_CALLS": "5",
        "QUIRE_SCHEDULER_BATCH_POLICY": "prefill_first",
        "QUIRE_SCHEDULER_ENABLE_PREFIX_CACHING": "false",
        "QUIRE_WORKER_ENFORCE_EAGER": "true",
        "QUIRE_WORKER_KV_CACHE_MEMORY": "1.5GiB",
        "QUIRE_WORKER_DTYPE": "float32",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gateway.max-live-calls", "0"), "greater than or equal to 1 (got '0')"),
        (("--dtype", "float"), "Input should be 'auto', 'float32', 'bfloat16' or 'float16'"),
        (("--worker.swap-space", "much"), "a size looks like 256MiB"),
        (("--dtype", "auto", "--worker.dtype", "auto"), "are the same setting"),
        (("--gateway.max-live-cals", "5"), "No such option: --gateway.max-live-cals"),
    ],
)
def test_a_wrong_flag_is_refused_before_anything_starts(arguments, message):
    result = serve(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_values_of_flags_are_checked_without_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for setting in service_settings():
            with contextlib.suppress(ValueError):
                setting.check("4096")


def test_a_number_of_workers_is_at_least_one_and_fits_a_machine():
    result = serve("--workers", "0")
    assert result.exit_code == 1
    assert result.stderr == "quire: --workers: must be at least 1 (got 0)\n"
    result = serve("--workers", "1025")
    assert result.exit_code == 1
    assert result.stderr == "quire: --workers: must be at most 1024 on one machine (got 1025)\n"


def test_the_help_has_frequent_settings_and_names_the_list_of_all():
    shown = serve("--help").stdout
    assert "--kv-cache-memory" in shown
    assert "--help-settings" in shown
    assert "--scheduler.watermark" not in shown


@pytest.mark.parametrize(
    ("address", "host", "port", "expected"),
    [
        (None, None, None, "127.0.0.1:50051"),
        (None, "0.0.0.0", None, "0.0.0.0:50051"),
        (None, None, 0, "127.0.0.1:0"),
        (None, "::1", 7, "[::1]:7"),
        ("unix:/s", None, None, "unix:/s"),
        ("", "h", None, ""),
    ],
)
def test_an_address_from_its_flag_or_its_parts(address, host, port, expected):
    assert listen_address("--listen", address, host, port, "127.0.0.1:50051") == expected


def test_an_address_has_no_other_parts():
    result = serve("--http-listen", "127.0.0.1:1", "--http-port", "2")
    assert result.exit_code == 1
    assert result.stderr.startswith("quire: --http-listen is an address, so --host")


def test_other_commands_do_not_import_the_services():
    script = "import sys, quire.cli; print(any(name.endswith('_svc') for name in sys.modules))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "m", "--dtype", "float32"], "needs tokenizers, redis, torch: pip install"),
        (["serve", "--help-settings"], "needs tokenizers, redis, torch: pip install"),
        (["pull", "a/b"], "pull needs huggingface-hub: pip install"),
        (["run-batch", "-i", __file__, "-o", "-"], "run-batch needs httpx2: pip install"),
    ],
)
def test_a_missing_extra_is_named(arguments, message):
    script = f"""
import sys
import warnings
packages = ("prometheus_client", "tokenizers", "redis", "torch", "httpx2", "huggingface_hub")
sys.modules.update(dict.fromkeys(packages))
from quire.cli import app
app({arguments!r})
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert message in run.stderr.splitlines()[-1]
