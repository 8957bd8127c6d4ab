"""The comparison of weights' types: parsing, timing and tables, from literal measurements."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from benchmarks.engines.__main__ import main
from benchmarks.engines.host import EngineError
from benchmarks.engines.models import TYPED, TYPED_LONG
from benchmarks.engines.types.checkpoints import weight_bytes
from benchmarks.engines.types.environments import Environments
from benchmarks.engines.types.llama_bench import BatchedBench, measurements, of_requests, of_stream
from benchmarks.engines.types.llama_server import new_tokens
from benchmarks.engines.types.loads import FULL, LONG, QUICK, Loads
from benchmarks.engines.types.make_compressed import int4, int8
from benchmarks.engines.types.quire_weights import quire_weight_bytes
from benchmarks.engines.types.rounds import Memory, Rounds, run_rounds
from benchmarks.engines.types.serving import run_at_once, run_streams
from benchmarks.engines.types.start import Started, quire_settings
from benchmarks.engines.types.table import table
from benchmarks.engines.types.variants import VARIANTS, Variant, chosen
from benchmarks.machine import instruction_sets
from benchmarks.report import markdown

LOADS = Loads(4, 3, {1: 2, 8: 1}, 2)
OURS, BATCHED, VLLM = (Variant(engine, "int8") for engine in ("quire", "llama.cpp", "vllm"))
# As llama-batched-bench prints them, with fields left out.
LINE = (
    '{{"pp": 4, "tg": 3, "pl": {pl}, "n_kv": {n_kv}, "t_pp": {t_pp}, "speed_tg": {tg}, "t": {t}}}'
)


def line(pl: int, t: float, t_pp: float = 0.5, tg: float = 6.0) -> str:
    return LINE.format(pl=pl, n_kv=7 * pl, t_pp=t_pp, tg=tg, t=t)


def results(*rates: float, stream: float = 10.0) -> dict[str, list[dict[str, float]]]:
    """One round per rate; eight requests at once are twice as fast as one."""
    return {
        "1": [{"tokens_per_s": rate} for rate in rates],
        "8": [{"tokens_per_s": 2 * rate} for rate in rates],
        "stream": [{"first_s": 0.25, "tokens_per_s": stream} for _ in rates],
    }


def rounds(missing: str | None = None) -> Rounds:
    return Rounds(
        results={
            # The second round is on a machine that is half as fast.
            OURS: results(30.0, 15.0, 30.0, stream=20.0),
            BATCHED: results(20.0, 10.0, 10.0),
        },
        memory={OURS: Memory(10**9, 4.0, 2500.0), BATCHED: Memory(10**9, None, None)},
        missing={VLLM: missing} if missing else {},
        bandwidths={OURS: [24.0, 40.0, 25.0], BATCHED: [25.0, 25.0, 25.0]},
    )


def test_every_type_has_quire_and_float32_no_one_else():
    assert [variant.engine for variant in VARIANTS if variant.type == "float32"] == ["quire"]
    assert len(VARIANTS) == 1 + 3 * 5
    assert len({variant.title for variant in VARIANTS}) == len(VARIANTS)


def test_systems_are_chosen_by_engine_type_or_both():
    assert chosen([]) == list(VARIANTS)
    assert {one.type for one in chosen(["llama-server"])} == {"bf16", "int8", "int4"}
    assert chosen(["quire-int8", "float32"]) == [Variant("quire", "float32"), OURS]
    with pytest.raises(ValueError, match="no such system: vllm-float32"):
        chosen(["vllm-float32"])


def test_an_unknown_system_is_refused_before_anything_is_measured(capsys):
    with pytest.raises(SystemExit):
        main(["0.6b", "--systems", "quire,tgi"])
    assert "no such system: tgi" in capsys.readouterr().err


def test_loads_have_equal_lengths_and_no_prompt_twice():
    prompts = FULL.prompts(500)
    assert [list(map(len, prompts[name])) for name in FULL.names] == [
        [1, 1, 1, 1],
        [8],
        [32],
        [1, 1, 1, 1],
    ]
    drawn = [tuple(one) for batches in prompts.values() for batch in batches for one in batch]
    assert {len(prompt) for prompt in drawn} == {160}
    assert len(set(drawn)) == len(drawn)
    assert FULL.prompts(500) == prompts
    assert max(map(max, drawn)) < 500
    assert QUICK.num_tokens == 40


@pytest.mark.parametrize(("shape", "loads"), [(TYPED, FULL), (TYPED_LONG, LONG)])
def test_the_pool_has_room_for_all_sequences_at_once(shape, loads):
    assert loads.num_tokens <= loads.max_model_len <= shape.max_position_embeddings
    assert max(loads.at_once) <= loads.max_num_seqs
    token_bytes = 2 * 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
    assert max(loads.at_once) * loads.num_tokens * token_bytes < shape.kv_cache_bytes


class Timed:
    """An engine whose calls take the seconds of a clock that it advances itself."""

    def __init__(self, counts: list[int]) -> None:
        self.now_s = 0.0
        self._counts = counts

    def run(self, prompts: list[list[int]], num_outputs: int) -> list[int]:
        self.now_s += 2.0
        return [num_outputs] * len(prompts)

    def stream(self, prompt: list[int], num_outputs: int) -> Iterator[int]:
        self.now_s += 0.5
        for count in self._counts:
            yield count
            self.now_s += 0.25


@pytest.fixture
def timed(monkeypatch):
    def make(*counts: int) -> Timed:
        engine = Timed(list(counts))
        monkeypatch.setattr("time.perf_counter", lambda: engine.now_s)
        return engine

    return make


def test_requests_at_once_count_prompts_and_outputs(timed):
    result = run_at_once(timed(), [[[1, 2], [3, 4]], [[5, 6]]], 3)
    assert result == {"seconds": 4.0, "tokens_per_s": 15 / 4}


def test_a_streams_rate_excludes_its_first_message(timed):
    assert run_streams(timed(1, 1, 1), [[[1]], [[2]]], 3) == {"first_s": 0.5, "tokens_per_s": 4.0}
    assert run_streams(timed(2, 1), [[[1]]], 3) == {"first_s": 0.5, "tokens_per_s": 4.0}


def test_outputs_of_another_length_are_an_error(timed):
    with pytest.raises(RuntimeError, match=r"outputs of \[2\] tokens instead of 3 each"):
        run_streams(timed(1, 1), [[[1]]], 3)


def test_the_batched_benchs_lines_are_found_among_others():
    text = f"main: loading\n\n{line(1, 2.0)}\nllama_perf: 1 ms\n{line(8, 7.0)}\n"
    found = list(measurements(text))
    assert [(one.num_requests, one.num_tokens, one.seconds) for one in found] == [
        (1, 7, 2.0),
        (8, 56, 7.0),
    ]


def test_repetitions_of_the_batched_bench_are_joined():
    found = list(measurements("\n".join([line(1, 2.0), line(1, 3.0)])))
    assert of_requests(found) == {"seconds": 5.0, "tokens_per_s": 14 / 5}
    found = list(measurements("\n".join([line(1, 2.0, 0.5, 6.0), line(1, 3.0, 0.7, 8.0)])))
    assert of_stream(found) == {"first_s": pytest.approx(0.6), "tokens_per_s": 7.0}


@pytest.fixture
def program(tmp_path):
    """A program that prints its arguments to stderr, and the given lines."""

    def make(*lines: str, status: int = 0) -> BatchedBench:
        path = tmp_path / "program"
        printed = "\n".join(f"echo '{one}'" for one in lines)
        path.write_text(f'#!/bin/sh\necho "$@" >&2\n{printed}\nexit {status}\n')
        path.chmod(0o755)
        return BatchedBench([str(path), "-m", "m.gguf"], LOADS, tmp_path / "log")

    return make


def test_each_load_is_a_command_of_the_batched_bench(program, tmp_path):
    bench = program(line(1, 2.0), line(1, 3.0))
    assert bench.call("warm") == {}
    assert bench.call("1")["seconds"] == 5.0
    assert (tmp_path / "log").read_text() == (
        "-m m.gguf -npp 4 -ntg 3 -npl 1,1 -c 7 --output-format jsonl\n"
    )
    assert bench.call("stream")["tokens_per_s"] == 6.0
    assert program(line(8, 7.0)).call("8")["tokens_per_s"] == 8.0
    assert "-npl 8 -c 56" in (tmp_path / "log").read_text()


def test_a_batched_bench_that_fails_or_leaves_loads_out_is_an_error(program):
    with pytest.raises(EngineError, match="exit status 3; its log ends"):
        program(line(8, 7.0), status=3).call("8")
    with pytest.raises(EngineError, match="exit status 0"):
        program(line(1, 7.0)).call("1")


def test_llama_servers_messages_may_bring_several_tokens_or_none():
    def data(num_predicted: int | None) -> str:
        timings = {} if num_predicted is None else {"timings": {"predicted_n": num_predicted}}
        return f"data: {json.dumps({'content': '', **timings})}"

    lines = [data(2), "", data(2), data(None), data(3), ": comment", data(7)]
    assert list(new_tokens(lines)) == [2, 1, 4]


def test_the_table_has_ratios_of_rounds_and_shares_of_bandwidth():
    part = table(TYPED, "int8", LOADS, rounds("no kernel for 8 bits"))
    ours, batched = part.rows
    assert (part.name, part.title) == (
        "types-0.6b-int8",
        "Weights of 8 bits, 600 million parameters",
    )
    # The ratios of the rounds are 1.5, 1.5 and 3.
    assert (ours["tokens_per_s_1"], batched["tokens_per_s_8"]) == (30.0, 20.0)
    assert (ours["ratio_1"], batched["ratio_1"], batched["stream_ratio"]) == (None, 1.5, 2.0)
    # 1 GB, 20 times per second, of 24, 40 and 25 GB/s.
    assert ours["of_bandwidth"] == pytest.approx(0.8)
    assert batched["stream_first_ms"] == 250.0
    assert "Not measured: vLLM W8A8, `LLM.generate`, eager: no kernel for 8 bits." in part.notes[-1]
    assert "around those of Quire 24.0, 40.0, 25.0 GB/s" in part.notes[1]
    assert "| 8 requests | speed-up |" in markdown(part)


def test_targets_are_those_of_the_measured_loads():
    part = table(TYPED, "int8", LOADS, rounds())
    assert [(target.aim, target.met) for target in part.targets[:3]] == [
        ("at least 1.2", True),
        ("at least 2", False),
        ("at least 0.8", True),
    ]
    # 1,000 MB of weights, 1,074 of the pool.
    assert part.targets[3].aim == "at most 2674 MB, weights + pool + 600"
    assert part.targets[3].met


def test_long_prompts_have_targets_for_streams_and_none_for_weights_and_starts():
    loads = replace(LOADS, at_once={1: 2}, is_short=False)
    part = table(TYPED_LONG, "int8", loads, rounds())
    assert (part.name, part.title) == (
        "types-0.6b-long-int8",
        "Weights of 8 bits, 600 million parameters, long prompts",
    )
    assert [
        (target.what.rpartition(", ")[2], target.aim, target.met) for target in part.targets
    ] == [
        ("1 request", "at least 1", True),
        ("first token", "at least 1", True),
        ("tokens after it", "at least 1", True),
    ]
    assert (part.rows[0]["first_ratio"], part.rows[1]["first_ratio"]) == (None, 1.0)
    assert "of bandwidth" not in markdown(part)


def test_without_quire_there_are_no_targets_and_no_ratios():
    found = rounds()
    others = Rounds({BATCHED: found.results[BATCHED]}, found.memory, {}, found.bandwidths)
    part = table(TYPED, "int8", LOADS, others)
    assert part.targets == []
    assert part.rows[0]["ratio_8"] is None


class Scripted:
    """A running variant, which fails at some load of a later round."""

    def __init__(self, calls: list[tuple[str, str]], name: str, fails_at: str | None) -> None:
        self._calls = calls
        self._name = name
        self._fails_at = fails_at
        self._reads = 0

    def call(self, command: str) -> object:
        if command == "read":
            self._reads += 1
            return 25.0 if self._reads % 2 else 27.0
        if command == "peak_rss_mb":
            return 100.0
        if command == self._fails_at and (self._name, command) in self._calls:
            raise EngineError("it has ended; its log ends:\n    out of memory")
        self._calls.append((self._name, command))
        return {"first_s": 1.0, "tokens_per_s": 2.0}


class ScriptedSetup:
    loads = LOADS

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def bandwidth(self, stack: object) -> Scripted:
        return Scripted(self.calls, "bandwidth", None)

    def start(self, variant: Variant, stack: object) -> Started:
        if variant == VLLM:
            raise EngineError("not installed in .cache/vllm")
        fails_at = "8" if variant == BATCHED else None
        return Started(Scripted(self.calls, variant.name, fails_at), 1, 3.0)


def test_variants_that_fail_are_left_out_and_named(capsys):
    setup = ScriptedSetup()
    found = run_rounds(setup, [OURS, VLLM, BATCHED], 2)
    assert list(found.results) == list(found.memory) == [OURS]
    assert found.missing == {VLLM: "not installed in .cache/vllm", BATCHED: "out of memory"}
    assert "vllm-int8 is left out: not installed in .cache/vllm\n" in capsys.readouterr().out
    assert len(found.results[OURS]["stream"]) == found.num_rounds == 2
    # Two values before and after each round's streams.
    assert found.bandwidths[OURS] == [26.0, 26.0]
    assert setup.calls[2:6] == [
        ("quire-int8", "1"),
        ("llama.cpp-int8", "1"),
        ("quire-int8", "8"),
        ("llama.cpp-int8", "8"),
    ]
    # In the second round the order is reversed.
    assert setup.calls[8:10] == [("llama.cpp-int8", "1"), ("quire-int8", "1")]


def test_engines_are_found_by_the_mark_of_their_target(tmp_path):
    llama = tmp_path / "llama.cpp"
    llama.mkdir()
    environments = Environments({"llama.cpp": llama, "vllm": None})
    with pytest.raises(EngineError, match=f"^not installed in {llama}$"):
        environments.llama_binary("llama-server")
    with pytest.raises(EngineError, match=r"^not installed$"):
        environments.python("vllm")
    assert environments.versions() == {}
    (llama / ".installed").write_text("llama-cpp-python==0.3.36\n")
    assert environments.folder("llama-server") == llama
    assert environments.versions() == {"llama-cpp-python": "0.3.36"}


def test_quires_settings_name_the_type():
    assert (
        quire_settings(Variant("quire", "float32"), TYPED, FULL)["QUIRE_WORKER_DTYPE"] == "float32"
    )
    assert "QUIRE_WORKER_QUANTIZATION" not in quire_settings(Variant("quire", "bf16"), TYPED, FULL)
    settings = quire_settings(OURS, TYPED, FULL, known={"quantization"})
    assert settings["QUIRE_WORKER_QUANTIZATION"] == "int8"
    with pytest.raises(EngineError, match="the worker has no setting --quantization"):
        quire_settings(OURS, TYPED, FULL, known={"dtype"})


def test_weights_are_counted_in_their_own_width(tmp_path):
    parameters = TYPED.num_parameters
    assert quire_weight_bytes(TYPED, "float32") == 4 * parameters
    assert quire_weight_bytes(TYPED, "bf16") == 2 * parameters
    # 28 layers with 12,288 outputs, and the output layer, which has 8 bits in both.
    head = 151_936 * (1024 + 8)
    assert quire_weight_bytes(TYPED, "int8") == parameters + 8 * (28 * 12_288 + 151_936)
    layers = parameters - 151_936 * 1024
    # Half a byte, and 4 bytes per 128 weights.
    assert quire_weight_bytes(TYPED, "int4") == head + layers * 17 // 32
    (tmp_path / "model.safetensors").write_bytes(bytes(3))
    (tmp_path / "tokenizer.json").write_bytes(bytes(50))
    assert weight_bytes(tmp_path) == weight_bytes(tmp_path / "model.safetensors") == 3


def test_compressed_weights_are_the_nearest_ones():
    weight = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    parts = int8(weight)
    assert (parts["weight"] * parts["weight_scale"] - weight).abs().max() < weight.abs().max() / 250
    parts = int4(weight)
    words = parts["weight_packed"]
    assert (words.shape, parts["weight_shape"].tolist()) == ((3, 32), [3, 256])
    values = torch.stack([(words >> 4 * at & 15) - 8 for at in range(8)], -1).view(3, 2, 128)
    restored = (values * parts["weight_scale"].unsqueeze(-1)).view(3, 256)
    assert (restored - weight).abs().max() < weight.abs().max() / 13


def test_instruction_sets_are_those_of_products():
    flags = "fpu avx2 avx512f avx512_bf16 amx_tile amx_bf16 avx512_vnni"
    assert instruction_sets(flags) == "avx2 avx512f avx512_vnni avx512_bf16 amx_bf16"
    assert instruction_sets(None) == ""
