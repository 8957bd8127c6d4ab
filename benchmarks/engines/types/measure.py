"""Measures the types, one after the other."""

from collections.abc import Iterator, Sequence

from benchmarks.engines.types.rounds import run_rounds
from benchmarks.engines.types.start import Setup
from benchmarks.engines.types.table import table
from benchmarks.engines.types.variants import TYPES, Variant
from benchmarks.report import Part


def measure_types(setup: Setup, variants: Sequence[Variant], num_rounds: int) -> Iterator[Part]:
    """Yield a table for each type of the variants. Processes of one type end before those of the
    next start: all of them together need more memory than many machines have."""
    for kind in TYPES:
        if of_type := [variant for variant in variants if variant.type == kind]:
            rounds = run_rounds(setup, of_type, num_rounds)
            yield table(setup.shape, kind, setup.loads, rounds)
