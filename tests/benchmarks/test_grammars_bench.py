"""The benchmark of structured output, at a small size."""

import json

import pytest

from benchmarks.grammars import guidance
from benchmarks.grammars.long_outputs import FREE, formats
from benchmarks.grammars.new_schemas import Comparison
from benchmarks.grammars.schemas import kinds, mixed_schemas
from gateway_svc.structured.json_schemas import prepare_schema


def test_schemas_are_drawn_from_their_seed() -> None:
    num_kinds = len(list(kinds()))
    assert mixed_schemas(2 * num_kinds) == mixed_schemas(2 * num_kinds)
    assert mixed_schemas(num_kinds) != mixed_schemas(num_kinds, seed=1)
    assert all(json.loads(json.dumps(schema)) == schema for schema in mixed_schemas(num_kinds))


def test_formats_of_requests_differ() -> None:
    for kind, each in formats(4).items():
        assert len({json.dumps(one) for one in each}) == (1 if kind == FREE else 4)


def test_new_schemas_are_served() -> None:
    schemas = [guidance.new_schema(50, number) for number in range(60)]
    for schema in schemas:
        prepare_schema(schema)
    assert len({json.dumps(schema) for schema in schemas}) == 60


def test_gaps_after_arrivals_are_compared() -> None:
    steady = [0.1 * number for number in range(10)]
    interrupted = [0.0, 0.1, 0.4, 0.5, 0.6, 0.7]
    compared = Comparison()
    compared.free.add(0.15, [steady, steady])
    compared.guided.add(0.15, [steady, interrupted])
    assert compared.guided.longest_s == pytest.approx([0.1, 0.3])
    assert compared.free.num_tokens == [8]
    assert compared.guided.num_tokens == [6]
    assert compared.added_ms(0) == pytest.approx(0)
    assert compared.added_ms(100) == pytest.approx(200)
    assert compared.late_ms() == pytest.approx(100)
    compared.free.add(0.15, [interrupted, interrupted])
    assert compared.free.noise_ms(50) == pytest.approx(200)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_parts_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guidance, "_NUM_TOKENS", 8)
    monkeypatch.setattr(guidance, "_NUM_ROWS", 4)
    measured = guidance.Guidance()
    assert [row["rows"] for row in measured.throughput(1).rows] == ["free", "guided by schemas"]
    assert measured.delay(1).targets[0].what.startswith("delay")
