"""A real Redis for every test that wants one, and a look at what each leaves behind."""

import gc
import os
import signal
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import redis
import structlog

from quire.launcher.redis import EmbeddedRedis

# Services that tests start inherit these.
# Models are tiny; a worker's default cache of 1 GiB costs two seconds of page faults.
os.environ.setdefault("QUIRE_WORKER_KV_CACHE_MEMORY", "64MiB")
# Nothing is left behind in the user's cache.
os.environ.setdefault("QUIRE_WORKER_WEIGHT_CACHE_SIZE", "0")
# More processes than cores: OpenMP's threads would spin on the cores that others need.
os.environ.setdefault("GOMP_SPINCOUNT", "100")

_HAS_GPU = Path("/dev/nvidiactl").exists()
# Triton asks when it is imported: without a driver of a GPU its kernels are interpreted.
if not _HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Its products are small: threads would mostly wait for each other, at full speed.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A script's background processes ignore it, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# structlog's default draws the variables of a traceback, which takes seconds.
structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper("%H:%M:%S.%f", utc=False),
        structlog.dev.set_exc_info,
        structlog.processors.format_exc_info,
        structlog.dev.ConsoleRenderer(colors=False),
    ]
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of tests live to the end: no collection of garbage has to look at them, neither
    while they are made, which would take a third of that time, nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In several processes the files that may take longest go first: one that began last would keep
    its process busy alone. A file's tests are estimated by their timeouts."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    seconds: defaultdict[Path, float] = defaultdict(float)
    for item in items:
        mark = item.get_closest_marker("timeout")
        default = item.config.getoption("timeout") or item.config.getini("timeout")
        seconds[item.path] += mark.args[0] if mark else float(default)
    items.sort(key=lambda item: -seconds[item.path])


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def gpu_locks(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Gives each test process lock files of its own, so that processes need not load one after
    another. Safe because their caches have fixed sizes; `test_worker_pool_gpu.py`, which measures
    free memory, runs alone."""
    if _HAS_GPU:
        os.environ["QUIRE_WORKER_GPU_LOCKS"] = str(tmp_path_factory.mktemp("gpu_locks"))


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """One private server for all tests of the session."""
    # Not pytest's own directory: its path may be too long for a socket.
    directory = tempfile.TemporaryDirectory(prefix="quire-")
    with directory as path, EmbeddedRedis(Path(path)) as server:
        yield server


@pytest.fixture(scope="module")
def weight_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Workers that are started as processes keep packed weights until the end of all tests: of one
    model, the first alone imports transformers, which takes most of a worker's start."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_WORKER_WEIGHT_CACHE", str(shared / "weights"))
        patch.setenv("QUIRE_WORKER_WEIGHT_CACHE_SIZE", "1GB")
        yield


@pytest.fixture
def redis_client(redis_server: EmbeddedRedis) -> Iterator[redis.Redis]:
    """Look at the server behind the back of what is tested."""
    with redis.Redis.from_url(redis_server.url) as client:
        yield client


@pytest.fixture
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for unix sockets, whose paths are limited to 107 bytes."""
    return tmp_path_factory.mktemp("s")


@pytest.fixture
def lasting_keys() -> list[str]:
    """Patterns of keys that may outlive the test without a time to live; a test adds its own.
    Leaderships, lists of pools and what schedulers know of one another outlive all services."""
    return ["quire:{shard:*}:leadership", "quire:{shard:*}:pools", "quire:{shard:0}:cluster:*"]


@pytest.fixture
def redis_url(
    redis_server: EmbeddedRedis, redis_client: redis.Redis, lasting_keys: list[str]
) -> Iterator[str]:
    """The URL of an empty Redis. The test fails if it leaves a key that lives for ever."""
    redis_client.flushall()
    yield redis_server.url
    leaked = [
        key.decode()
        for key in sorted(redis_client.scan_iter())
        if redis_client.ttl(key) == -1
        and not any(fnmatchcase(key.decode(), pattern) for pattern in lasting_keys)
    ]
    redis_client.flushall()
    assert not leaked, f"keys that live for ever: {leaked}"
