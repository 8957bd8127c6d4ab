"""The keys file: what is accepted, what is refused with which reason, and when it is read again."""

import asyncio
import os
import resource
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from waiting import until

from gateway_svc.access.keys_file import MAX_CLASSES, KeysFileError, parse_keys, read_keys_file
from gateway_svc.access.keys_watch import KeysWatch
from gateway_svc.access.tenant import PriorityRange, Tenant, TenantLimits
from quire.service.api_keys import hash_key
from quire.service.errors import RequestError

# Not random: parameters of tests are in their names.
FIRST, SECOND = "quire-first", "quire-second"
WHOLE = f"""
- name: research
  keys: [{hash_key(FIRST).hex()}, {hash_key(SECOND).hex()}]
  weight: 2
  admin: true
  share_prefixes: true
  priority: {{min: -1, max: 5}}
  class: interactive
  limits:
    requests_per_minute: 60
    tokens_per_minute: 1000
    live_requests: 4
    waiting_tokens: 500
    resumable_requests: 0
    output_tokens: 100
    resume_window_s: 30
- name: plain
"""


def entry(name: str, *keys: str, rest: str = "") -> str:
    return f"- name: {name}\n  keys: [{', '.join(hash_key(key).hex() for key in keys)}]\n{rest}"


def test_every_field_is_read() -> None:
    tenants = parse_keys(WHOLE)
    assert set(tenants) == {hash_key(FIRST), hash_key(SECOND)}
    assert tenants[hash_key(FIRST)] is tenants[hash_key(SECOND)]
    limits = TenantLimits(60, 1000, 4, 500, 0, 100, 30)
    expected = Tenant("research", 2.0, True, True, PriorityRange(-1, 5), limits, "interactive")
    assert tenants[hash_key(FIRST)] == expected


def test_a_tenant_without_fields_has_no_limits() -> None:
    assert parse_keys(entry("a", FIRST))[hash_key(FIRST)] == Tenant("a")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "file: must be a list of tenants"),
        ("name: a", "file: must be a list of tenants"),
        ("- title: a", "[0].name: Field required; [0].title: no such field"),
        ("- name: a b", "[0].name: String should match pattern"),
        ("- {name: a, limits: {requests: 3}}", "[0].limits.requests: no such field"),
        ("- {name: a, limits: {live_requests: 0}}", "[0].limits.live_requests: Input should be"),
        ("- name: a\n  limits:", "[0].limits: must have the fields of limits"),
        ("- {name: a, priority: 3}", "[0].priority: must have the fields of priority"),
        ("- {name: a, weight: 0}", "[0].weight: Input should be greater than"),
        ("- {name: a, weight: '2'}", "[0].weight: Input should be a valid number"),
        ("- {name: a, admin: 1}", "[0].admin: Input should be a valid boolean"),
        ("- {name: a, priority: {min: 2, max: 1}}", "[0].priority: min must not be above max"),
        ("- {name: a, name: b}", "line 1: a field is given twice"),
        ("- {name: a}\n- {name: a}", "tenant 'a' is given twice"),
        (entry("a", FIRST) + entry("b", FIRST), "a key of tenant 'b' is given twice"),
        ("- {name: a, class: Fast}", "[0].class: String should match pattern"),
        ("- {name: a, tenant_class: fast}", "[0].tenant_class: no such field"),
        (
            "\n".join(f"- {{name: t{n}, class: c{n}}}" for n in range(MAX_CLASSES)),
            "there are more than 8 classes, default included",
        ),
        ("- {name: a", "line 1: "),
        ("- name: a\n- name: 2026-02-30", "line 2: not a valid value"),
        ("- {name: a, weight: !!float x}", "line 1: not a valid value"),
        ("- {name: a, admin: !!bool x}", "line 1: not a valid value"),
        ("- !!timestamp x", "line 1: not a valid value"),
        ("- name: a\n- !!set x", "line 2: must have fields"),
        ("- !!map [x]", "line 1: must have fields"),
        (f"- {{name: a, weight: {'9' * 5000}}}", "line 1: not a valid value"),
        ("[" * 2000, "it is nested too deeply"),
        (
            "- name: a\n- b\n- c: 1",
            "[1]: must have the fields of a tenant; [2].name: Field required",
        ),
        ("- name: a\n---\n- name: b", "file: must be one list, without '---' after it"),
    ],
)
def test_an_invalid_file_is_refused_with_the_place_and_the_reason(text: str, reason: str) -> None:
    with pytest.raises(KeysFileError) as refused:
        parse_keys(text)
    assert str(refused.value).startswith(reason)


@pytest.mark.parametrize(
    "text",
    [
        f"- {{name: a, keys: [{FIRST}]}}",
        f"- 'a {FIRST}",
        f"*{FIRST}",
        f"- {{name: a, {FIRST}: a}}",
    ],
)
def test_a_key_in_the_place_of_its_hash_is_not_in_the_message(text: str) -> None:
    with pytest.raises(KeysFileError) as refused:
        parse_keys(text)
    assert FIRST not in str(refused.value)


def test_a_message_has_the_first_reasons() -> None:
    with pytest.raises(KeysFileError) as refused:
        parse_keys("".join(f"- {{name: t{n}, key: x}}\n" for n in range(1000)))
    reasons = str(refused.value).split("; ")
    assert reasons[:2] == ["[0].key: no such field", "[1].key: no such field"]
    assert (len(reasons), reasons[-1]) == (21, "and 980 more")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeysFileError, match=r"keys\.yaml cannot be read: No such file"):
        read_keys_file(tmp_path / "keys.yaml")


def test_a_pipe_is_refused_instead_of_waiting_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "keys.yaml")
    with pytest.raises(KeysFileError, match=r"cannot be read: it is a pipe or a device, not a reg"):
        KeysWatch(tmp_path / "keys.yaml")


def test_the_tree_of_a_whole_file_is_never_in_memory() -> None:
    """Collecting the garbage of 10,000 tenants at once holds up the event loop."""
    text = "".join(entry(f"t{n}", f"k{n}") for n in range(200))
    parse_keys(text)
    tracemalloc.start()
    try:
        parse_keys(text)
        assert tracemalloc.get_traced_memory()[1] < 25 * len(text)
    finally:
        tracemalloc.stop()


def test_a_removed_key_is_refused_however_the_file_changed(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(entry("a", FIRST))
    watch = KeysWatch(path)
    # In place, with the same size and the former time, as by `rsync --inplace --times`.
    found = path.stat()
    path.write_text(entry("a", SECOND))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    with capture_logs() as logs:
        watch.poll()
        assert watch.authentication.authenticate(f"Bearer {SECOND}").name == "a"
        with pytest.raises(RequestError, match="unknown or was removed"):
            watch.authentication.authenticate(f"Bearer {FIRST}")
        # While the process can open no file.
        path.write_text("[]")
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            watch.poll()
            watch.poll()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        watch.poll()
        watch.poll()
    with pytest.raises(RequestError, match="unknown or was removed"):
        watch.authentication.authenticate(f"Bearer {SECOND}")
    assert [(one["event"], one["log_level"]) for one in logs] == [
        ("keys file reloaded", "info"),
        ("keys file not reloaded", "error"),
        ("keys file reloaded", "info"),
        ("the keys file has no keys", "warning"),
    ]


def test_a_range_without_0_has_a_default() -> None:
    assert [PriorityRange(*r).default for r in ((-3, 3), (2, 5), (-5, -2))] == [0, 2, -2]


async def test_changes_are_read_and_an_invalid_file_keeps_the_former_keys(tmp_path: Path) -> None:
    path, partial = tmp_path / "keys.yaml", tmp_path / "keys.partial"
    path.write_text(entry("a", FIRST))
    watch = KeysWatch(path)
    header = {key: f"Bearer {key}" for key in (FIRST, SECOND)}

    def knows(key: str) -> bool:
        try:
            watch.authentication.authenticate(header[key])
        except RequestError:
            return False
        return True

    assert (knows(FIRST), knows(SECOND)) == (True, False)
    with capture_logs() as logs:
        polling = asyncio.create_task(watch.run())
        # In place, and then by a rename.
        path.write_text(entry("a", FIRST, SECOND))
        await until(lambda: knows(SECOND), "an added key")
        path.write_text("- nonsense")
        await until(lambda: any(one["log_level"] == "error" for one in logs), "a logged error")
        assert knows(FIRST)
        assert knows(SECOND)
        partial.write_text(entry("a", SECOND))
        partial.rename(path)
        await until(lambda: not knows(FIRST), "a removed key")
        path.unlink()
        await until(lambda: len(logs) == 4, "the error of a missing file")
        assert knows(SECOND)
        polling.cancel()
    events = ["keys file reloaded", "keys file not reloaded"] * 2
    assert [one["event"] for one in logs] == events
    assert FIRST not in str(logs)


async def test_the_file_is_still_watched_after_the_system_has_refused_a_thread(
    tmp_path: Path,
) -> None:
    class Lacking(ThreadPoolExecutor):
        num_refusals = 3

        def submit(self, *args: Any, **kwargs: Any) -> Any:
            self.num_refusals -= 1
            if self.num_refusals >= 0:
                raise RuntimeError("can't start new thread")
            return super().submit(*args, **kwargs)

    path = tmp_path / "keys.yaml"
    path.write_text(entry("a", FIRST))
    watch = KeysWatch(path)
    asyncio.get_running_loop().set_default_executor(Lacking(1))
    path.write_text("[]")
    with capture_logs() as logs:
        watching = asyncio.create_task(watch.run())
        await until(lambda: len(logs) == 3, "the file to be read")
        watching.cancel()
    assert [one["event"] for one in logs] == [
        "keys file not reloaded",
        "keys file reloaded",
        "the keys file has no keys",
    ]
    assert logs[0]["reason"] == "the file was not read: RuntimeError"
    with pytest.raises(RequestError, match="unknown or was removed"):
        watch.authentication.authenticate(f"Bearer {FIRST}")


def test_the_documented_file_is_valid() -> None:
    page = Path(__file__).parents[2] / "docs" / "access.md"
    text = page.read_text().partition("```yaml\n")[2].partition("```")[0]
    first, second = parse_keys(text).values()
    assert (first.name, first.limits.live_requests, second.name) == ("research", 100, "batch")
