"""The measurement of ranks, with real processes and a tiny model."""

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import llama, save_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_shards_and_stages_are_measured(tmp_path: Path) -> None:
    config = llama()
    config.vocab_size, config.max_position_embeddings = 32_000, 1024
    model = save_model(config, tmp_path)
    options = ["--no-write", "--rows", "2", "--steps", "2", "--rounds", "1"]
    command = [sys.executable, "-m", "benchmarks.ranks", *options, str(model)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("| 2 ")]
    layouts = [tuple(int(cell) for cell in row[1:4]) for row in rows]
    assert layouts == [(2, 1, 1), (2, 2, 1), (2, 2, 2)], done.stderr
