"""Runs every program in `examples/` against one private stack and checks its output."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.launcher.stack import LocalStack

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
MOST_LINES = 40
# A regular expression for the whole output of each example.
EXPECTED = {
    "async_client.py": r"('Return the first \d items of': first token after [\d.]+ s -> .+\n){8}",
    "chat.py": r"(user: .+\nassistant: (.|\n)+\n){2}",
    "offline.py": r"('(Return|Raise|Open) .+' -> .+ \((stop|length)\)\n){3}",
    "raw_grpc.py": r"services: .*quire\.v1\.InferenceService.*\n(.|\n)+\n\d+ tokens\n",
    "resume.py": r"(.|\n)+\n-- disconnected after \d+ tokens --\n(.|\n)+\n-- 64 tokens in all --\n",
    "sampling.py": r"same seed, same text: True\n(choice \d: .+\n){3}"
    r"ended by (stop, '[.,]'|length, None)\n(most likely: .+\n){1,4}",
    "shared_prefix.py": r"\d+ prompt tokens, 0 cached\n"
    r"(\d+ prompt tokens, [1-9]\d* cached\n){2}with another salt: 0 cached\n",
}


@pytest.fixture(scope="module")
def address(weight_cache: None) -> Iterator[str]:
    settings = {"QUIRE_WORKER_THREADS": "1", "QUIRE_WORKER_KV_CACHE_MEMORY": "64MiB"}
    with LocalStack(str(ROOT / "demo/model"), settings=settings) as stack:
        yield stack.address


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, f"examples/{name}", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_prints_what_it_shows(name: str, address: str) -> None:
    printed = run(name, f"--target={address}")
    assert re.fullmatch(EXPECTED[name], printed), printed


def test_every_example_is_short_and_listed() -> None:
    assert list(EXPECTED) == EXAMPLES
    readme = (ROOT / "examples/README.md").read_text()
    assert sorted(re.findall(r"\]\((\w+\.py)\)", readme)) == EXAMPLES
    for name in EXAMPLES:
        assert len((ROOT / "examples" / name).read_text().splitlines()) <= MOST_LINES


def test_raw_grpc_imports_nothing_of_quire() -> None:
    assert not re.search(r"(from|import) quire", (ROOT / "examples/raw_grpc.py").read_text())
