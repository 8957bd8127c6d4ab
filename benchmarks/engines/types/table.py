"""The table of one type, and its targets."""

from collections.abc import Iterator

from benchmarks.engines.models import Shape
from benchmarks.engines.types.loads import STREAM, Loads
from benchmarks.engines.types.quire_weights import pool_bytes
from benchmarks.engines.types.rounds import Rounds
from benchmarks.engines.types.variants import (
    BFLOAT16,
    INT4,
    INT8,
    LLAMA,
    OPENVINO,
    QUIRE,
    TITLES,
    VLLM,
    Variant,
)
from benchmarks.report import Cell, Column, Part, Target

# Least ratio of Quire's speed to another engine's, by the number of requests at once.
_RATIOS = {
    (BFLOAT16, VLLM): {1: 1.15, 8: 1.15, 32: 1.15},
    (BFLOAT16, LLAMA): {1: 1.15, 8: 1.15, 32: 1.15},
    (BFLOAT16, OPENVINO): {1: 1.0, 8: 1.0, 32: 1.0},
    (INT8, LLAMA): {1: 1.2, 8: 2.0, 32: 2.0},
    (INT8, OPENVINO): {1: 1.0, 8: 1.0, 32: 1.0},
    (INT4, LLAMA): {1: 1.0, 8: 1.5, 32: 1.5},
    (INT4, OPENVINO): {1: 1.0, 8: 1.0, 32: 1.0},
}
# With long prompts, of any type.
_LONG_RATIO = 1.0
_LONG = ", long prompts"
_OF_BANDWIDTH = 0.8
_FIRST_START_S, _CACHED_START_S = 8, 4
_BESIDE_MB = 600


_SHORT_COLUMNS = (
    Column("weight_mb", "weights MB", ",.0f"),
    Column("of_bandwidth", "of bandwidth", ".2f"),
    Column("ready_s", "ready s", ".1f"),
    Column("cached_ready_s", "from cache", ".1f"),
)
_READING_LONG = (
    "*Speed-up* is that of Quire over the system, a median of the rounds' ratios. *One stream* is "
    "streams one after the other: the time to the first token, and the tokens per second after it."
)


def part_name(shape: Shape, kind: str) -> str:
    return f"types-{shape.name}-{kind}"


def table(shape: Shape, kind: str, loads: Loads, rounds: Rounds) -> Part:
    """Build the table of the variants of one type."""
    title = TITLES[kind]
    reading = _reading(rounds, Variant(QUIRE, kind)) if loads.is_short else _READING_LONG
    return Part(
        name=part_name(shape, kind),
        title=f"{title[0].upper()}{title[1:]}, {shape.size}{'' if loads.is_short else _LONG}",
        notes=[_setting(loads, rounds), reading, *_missing(rounds)],
        columns=_columns(loads),
        rows=[_row(variant, kind, loads, rounds) for variant in rounds.results],
        targets=list(_targets(shape, kind, loads, rounds)),
    )


def _setting(loads: Loads, rounds: Rounds) -> str:
    return (
        f"Prompts of {loads.num_prompt_tokens:,} random tokens, outputs of "
        f"{loads.num_output_tokens}; greedy, without prefix caches, on all cores. Tokens per "
        "second of the whole work, prompts and outputs, by the number of requests sent at once; "
        f"medians of the rounds ({rounds.num_rounds})."
    )


def _reading(rounds: Rounds, ours: Variant) -> str:
    around = ", ".join(f"{bandwidth:.1f}" for bandwidth in rounds.bandwidths.get(ours, []))
    shown = f"; around those of Quire {around} GB/s" if around else ""
    return (
        "*Speed-up* is that of Quire over the system, a median of the rounds' ratios. *One "
        "stream* is streams one after the other: the time to the first token, and the tokens per "
        "second after it. *Of bandwidth* is the weights' size times that rate, as a share of the "
        "average bandwidth at which all cores read memory before and after the streams, a median "
        f"of the rounds{shown}. *From "
        "cache* is the second start, which maps the packed weights that the first one has written; "
        "both are medians of three."
    )


def _missing(rounds: Rounds) -> Iterator[str]:
    if rounds.missing:
        named = "; ".join(f"{one.title}: {reason}" for one, reason in rounds.missing.items())
        yield f"Not measured: {named}."


def _columns(loads: Loads) -> list[Column]:
    return [
        Column("system", "system"),
        *(
            column
            for n in loads.at_once
            for column in (
                Column(f"tokens_per_s_{n}", f"{n} request{'s' * (n > 1)}", ",.0f"),
                Column(f"ratio_{n}", "speed-up", ".2f"),
            )
        ),
        Column("stream_first_ms", "one stream, first token ms", ",.0f"),
        *(() if loads.is_short else [Column("first_ratio", "speed-up", ".2f")]),
        Column("stream_tokens_per_s", "tokens/s", ".1f"),
        Column("stream_ratio", "speed-up", ".2f"),
        *(_SHORT_COLUMNS if loads.is_short else ()),
    ]


def _row(variant: Variant, kind: str, loads: Loads, rounds: Rounds) -> dict[str, Cell]:
    ours = Variant(QUIRE, kind)
    memory = rounds.memory[variant]

    is_other = variant != ours and ours in rounds.results

    def ratio(load: str) -> float | None:
        return rounds.ratio(ours, variant, load) if is_other else None

    cells: dict[str, Cell] = {"system": variant.title}
    for n in loads.at_once:
        cells[f"tokens_per_s_{n}"] = rounds.tokens_per_s(variant, str(n))
        cells[f"ratio_{n}"] = ratio(str(n))
    return {
        **cells,
        "stream_first_ms": 1000 * rounds.first_s(variant),
        "stream_tokens_per_s": rounds.tokens_per_s(variant, STREAM),
        "stream_ratio": ratio(STREAM),
        "first_ratio": rounds.first_ratio(ours, variant) if is_other else None,
        "weight_mb": memory.weight_bytes / 1e6,
        "of_bandwidth": rounds.of_bandwidth(variant),
        "ready_s": memory.ready_s,
        "cached_ready_s": memory.cached_ready_s,
        "peak_rss_mb": memory.peak_rss_mb,
    }


def _targets(shape: Shape, kind: str, loads: Loads, rounds: Rounds) -> Iterator[Target]:
    ours = Variant(QUIRE, kind)
    if ours not in rounds.results:
        return
    yield from _ratio_targets(kind, loads, rounds)
    if not loads.is_short:
        return
    if kind in (INT8, INT4):
        share = rounds.of_bandwidth(ours)
        what = "one stream reads the weights at this share of the bandwidth"
        yield Target(what, f"at least {_OF_BANDWIDTH:g}", f"{share:.2f}", share >= _OF_BANDWIDTH)
    memory = rounds.memory[ours]
    if kind == BFLOAT16:
        for what, seconds, most_s in (
            ("first start", memory.ready_s, _FIRST_START_S),
            ("start from the cache of packed weights", memory.cached_ready_s, _CACHED_START_S),
        ):
            if seconds is not None:
                aim_s = f"at most {most_s:g} s"
                yield Target(f"{what}, ready", aim_s, f"{seconds:.1f} s", seconds <= most_s)
    if (peak := memory.peak_rss_mb) is not None:
        most = (memory.weight_bytes + pool_bytes(shape, kind)) / 1e6 + _BESIDE_MB
        aim_mb = f"at most {most:.0f} MB, weights + pool + {_BESIDE_MB}"
        yield Target("peak resident size of the worker", aim_mb, f"{peak:.0f} MB", peak <= most)


def _ratio_targets(kind: str, loads: Loads, rounds: Rounds) -> Iterator[Target]:
    ours = Variant(QUIRE, kind)

    def target(what: str, aim: float, ratio: float) -> Target:
        return Target(f"speed-up over {what}", f"at least {aim:g}", f"{ratio:.2f}", ratio >= aim)

    for other in rounds.results:
        if other == ours:
            continue
        aims = dict.fromkeys(loads.at_once, _LONG_RATIO)
        if loads.is_short:
            aims = _RATIOS.get((kind, other.engine), {})
        for n in filter(aims.__contains__, loads.at_once):
            what = f"{other.title}, {n} request{'s' * (n > 1)}"
            yield target(what, aims[n], rounds.ratio(ours, other, str(n)))
        if not loads.is_short:
            first, rest = rounds.first_ratio(ours, other), rounds.ratio(ours, other, STREAM)
            yield target(f"{other.title}, one stream, first token", _LONG_RATIO, first)
            yield target(f"{other.title}, one stream, tokens after it", _LONG_RATIO, rest)
