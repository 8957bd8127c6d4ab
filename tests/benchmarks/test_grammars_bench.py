"""The benchmark of structured output, at a small size."""

import json

import pytest

from benchmarks.grammars import guidance
from benchmarks.grammars.schemas import kinds, mixed_schemas


def test_schemas_are_drawn_from_their_seed() -> None:
    num_kinds = len(list(kinds()))
    assert mixed_schemas(2 * num_kinds) == mixed_schemas(2 * num_kinds)
    assert mixed_schemas(num_kinds) != mixed_schemas(num_kinds, seed=1)
    assert all(json.loads(json.dumps(schema)) == schema for schema in mixed_schemas(num_kinds))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_parts_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guidance, "_NUM_TOKENS", 8)
    monkeypatch.setattr(guidance, "_NUM_ROWS", 4)
    measured = guidance.Guidance()
    assert [row["rows"] for row in measured.throughput(1).rows] == ["free", "guided by schemas"]
    assert measured.delay(1).targets[0].what.startswith("delay")
