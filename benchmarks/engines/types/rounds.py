"""Runs all rounds of the variants of one type."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import mean, median

from benchmarks.engines.host import EngineError
from benchmarks.engines.types.loads import STREAM, WARM
from benchmarks.engines.types.start import Runner, Setup, Started
from benchmarks.engines.types.variants import QUIRE, Variant

# Results of a load, one per round.
Results = Sequence[Mapping[str, float]]
_TOKENS_PER_S = "tokens_per_s"
# The command of the process that measures the bandwidth.
_READ = "read"


@dataclass(frozen=True)
class Memory:
    """What is known of a variant besides its results."""

    weight_bytes: int
    ready_s: float | None
    # Quire's worker only.
    peak_rss_mb: float | None
    cached_ready_s: float | None = None


@dataclass(frozen=True)
class Rounds:
    """Results of one type, by variant and load."""

    results: Mapping[Variant, Mapping[str, Results]]
    memory: Mapping[Variant, Memory]
    # Variants that cannot be measured, and why.
    missing: Mapping[Variant, str]
    # In GB/s, those around the streams of each variant, one per round.
    bandwidths: Mapping[Variant, Sequence[float]]

    @property
    def num_rounds(self) -> int:
        return max(map(len, self.bandwidths.values()), default=0)

    def tokens_per_s(self, variant: Variant, load: str) -> float:
        """Return the median over the rounds."""
        return median(one[_TOKENS_PER_S] for one in self.results[variant][load])

    def first_s(self, variant: Variant) -> float:
        """Return the median time to the first token of a stream."""
        return median(one["first_s"] for one in self.results[variant][STREAM])

    def ratio(self, faster: Variant, slower: Variant, load: str) -> float:
        """Return the median of the rounds' ratios."""
        pairs = zip(self.results[faster][load], self.results[slower][load], strict=True)
        return median(one[_TOKENS_PER_S] / other[_TOKENS_PER_S] for one, other in pairs)

    def first_ratio(self, faster: Variant, slower: Variant) -> float:
        """Return the median of the rounds' ratios of the times to a stream's first token."""
        pairs = zip(self.results[faster][STREAM], self.results[slower][STREAM], strict=True)
        return median(other["first_s"] / one["first_s"] for one, other in pairs)

    def of_bandwidth(self, variant: Variant) -> float:
        """Return the share of the read bandwidth at which a stream reads the weights."""
        gigabytes = self.memory[variant].weight_bytes / 1e9
        streams = self.results[variant][STREAM]
        return median(
            gigabytes * one[_TOKENS_PER_S] / bandwidth
            for one, bandwidth in zip(streams, self.bandwidths[variant], strict=True)
        )


def run_rounds(setup: Setup, variants: Sequence[Variant], num_rounds: int) -> Rounds:
    """Start the variants and run all rounds. A variant that fails is left out."""
    with ExitStack() as stack:
        running = _Running(setup, stack, setup.bandwidth(stack))
        for variant in variants:
            running.start(variant)
        for number in range(num_rounds):
            running.run_round(backwards=number % 2 == 1)
        return Rounds(running.results, running.memory(), running.missing, running.bandwidths)


class _Running:
    """The variants that have started and not failed."""

    def __init__(self, setup: Setup, stack: ExitStack, bandwidth: Runner) -> None:
        self._setup = setup
        self._stack = stack
        self._bandwidth = bandwidth
        self._started: dict[Variant, Started] = {}
        self.results: dict[Variant, dict[str, list[Mapping[str, float]]]] = {}
        self.missing: dict[Variant, str] = {}
        self.bandwidths: dict[Variant, list[float]] = {}

    def start(self, variant: Variant) -> None:
        def begin() -> None:
            started = self._setup.start(variant, self._stack)
            started.runner.call(WARM)
            self._started[variant] = started
            self.results[variant] = {load: [] for load in self._setup.loads.names}
            self.bandwidths[variant] = []

        self._guarded(variant, begin)

    def run_round(self, *, backwards: bool) -> None:
        """Run each load on all variants, one after the other, before the next load. The order
        alternates between rounds, so that a machine that becomes slower or faster favours none."""
        for load in self._setup.loads.names:
            for variant in list(self._started)[:: -1 if backwards else 1]:
                if load == STREAM:
                    self._run_streams(variant)
                else:
                    self._run(variant, load)

    def memory(self) -> dict[Variant, Memory]:
        return {
            variant: Memory(
                started.weight_bytes,
                started.ready_s,
                started.runner.call("peak_rss_mb") if variant.engine == QUIRE else None,
                started.cached_ready_s,
            )
            for variant, started in self._started.items()
        }

    def _run_streams(self, variant: Variant) -> None:
        """Measure the bandwidth before and after, as it changes within a minute."""
        before = self._bandwidth.call(_READ)
        self._run(variant, STREAM)
        self.bandwidths[variant].append(mean([before, self._bandwidth.call(_READ)]))

    def _run(self, variant: Variant, load: str) -> None:
        def run() -> None:
            result = self._started[variant].runner.call(load)
            self.results[variant][load].append(result)

        self._guarded(variant, run)

    def _guarded(self, variant: Variant, action: Callable[[], None]) -> None:
        """Leave the variant out if the action fails."""
        try:
            action()
        except EngineError as error:
            print(f"{variant.name} is left out: {error}", flush=True)
            self.missing[variant] = str(error).splitlines()[-1].strip()
            self._started.pop(variant, None)
            self.results.pop(variant, None)
