"""Rows that follow grammars, on the worker's runners."""

import dataclasses
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grammar_tokenizers import SPECIAL, byte_level
from host_device import HostCapturer, HostStreams
from llguidance import LLMatcher
from transformers import AutoModelForCausalLM, LlamaConfig
from worker_driver import worker_settings

from benchmarks.grammars.guided_rows import GuidedRow, RowDriver
from kernels.dispatch import choose
from quire.service.grammars import GrammarError, GrammarVocabulary
from worker_svc.gpu.pipelined_runner import PipelinedRunner
from worker_svc.grammar.compiler import GrammarCompiler, find_grammars
from worker_svc.grammar.masks import MaskWork, TokenMasks
from worker_svc.grammar.processor import GrammarProcessor
from worker_svc.loading.runner_loading import load_runner
from worker_svc.loading.startup import start_pipelined
from worker_svc.logits.processor import ProcessorContext
from worker_svc.plan.failures import InvalidField, RowFailure
from worker_svc.plan.inputs import Ints
from worker_svc.plan.logits_params import Grammar, LogitsParams
from worker_svc.runner.multi_step import MultiStepRunner
from worker_svc.runner.runner import Runner
from worker_svc.runner.step_runner import LoadedRunner, no_op
from worker_svc.speculation.prompt_lookup import PromptLookup

TOKENIZER = byte_level()
VOCABULARY = GrammarVocabulary.from_tokenizer(TOKENIZER, TOKENIZER.get_vocab_size())
STOPS = np.array([TOKENIZER.token_to_id(text) for text in SPECIAL])
LARKS = (
    'start: "{\\"" /[a-z]{2,8}/ "\\":true}"',
    "start: /[0-9]{1,12}/",
    'start: "a" start "b" | "-"',
    'start: "true" | "tr" /[abc]{3}/ | /true [x-z]+/',
)
MAX_TOKENS = 24
# Of a lexer; fewer than a few outputs need.
MANY_STATES = 400
LOOKAHEAD = 16
FIELD = Grammar.field
DIGITS = TOKENIZER.encode("0123456789").ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TOKENIZER.get_vocab_size() + 5,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        initializer_range=0.3,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(made)
    TOKENIZER.save(str(made / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedRunner:
    return load_runner(worker_settings(folder, num_blocks=400))


def _row(number: int, begins_after: str = "") -> GuidedRow:
    definition = LLMatcher.grammar_from_lark(LARKS[number % len(LARKS)])
    begins = tuple(TOKENIZER.encode(begins_after).ids)
    params = LogitsParams(stop_token_ids=STOPS, grammar=Grammar(definition, begins))
    prompt = TOKENIZER.encode(f"prompt {number}").ids
    return GuidedRow(prompt, params, seed=number, max_tokens=MAX_TOKENS)


def _free(number: int) -> GuidedRow:
    """The same without a grammar."""
    return dataclasses.replace(_row(number), params=None)


def _outputs(loaded: LoadedRunner, rows: list[GuidedRow], num_rounds: int = 1) -> list[list[int]]:
    RowDriver(loaded).run(rows, num_rounds)
    assert [row.failure for row in rows] == [None] * len(rows)
    return [row.output for row in rows]


def _follows(row: GuidedRow) -> bool:
    """Whether a finished output is in its grammar."""
    assert row.params is not None
    assert row.params.grammar is not None
    matcher = VOCABULARY.compile(row.params.grammar.definition)
    return matcher.consume_tokens(row.output[:-1]) and matcher.is_accepting()


def test_32_rows_equal_those_alone_and_follow_their_grammars(loaded: LoadedRunner) -> None:
    together = [_row(number) for number in range(32)]
    outputs = _outputs(loaded, together)
    assert sum(row.is_finished for row in together) > 16
    assert all(_follows(row) for row in together if row.is_finished)
    for number in range(0, 32, 5):
        assert _outputs(loaded, [_row(number)]) == [outputs[number]]


def test_the_vocabulary_is_read_before_the_worker_is_ready(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read it holds the interpreter, and the tokens of other rows would wait."""
    fresh = load_runner(worker_settings(folder, num_blocks=400))
    monkeypatch.setattr(GrammarVocabulary, "_read", None)
    row = _row(0)
    assert _outputs(fresh, [row]) == [row.output]
    assert row.output


def test_several_rounds_give_the_same_tokens(loaded: LoadedRunner) -> None:
    expected = _outputs(loaded, [_row(number) for number in range(8)])
    assert _outputs(loaded, [_row(number) for number in range(8)], num_rounds=4) == expected


def test_drafts_of_rows_with_grammars_change_no_token(
    loaded: LoadedRunner, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an accepted draft ends the output."""
    accepted = []
    observe = PromptLookup.observe

    def observed(self: PromptLookup, rows: Ints, num_drafts: Ints, num_accepted: Ints) -> None:
        accepted.append(int(num_accepted.sum()))
        observe(self, rows, num_drafts, num_accepted)

    monkeypatch.setattr(PromptLookup, "observe", observed)
    speculating = load_runner(worker_settings(folder, num_blocks=400, num_speculative_tokens=5))
    expected = [_row(number) for number in range(16)]
    _outputs(loaded, expected)
    for num_rounds in (1, 3):
        found = [dataclasses.replace(row, output=[]) for row in expected]
        RowDriver(speculating, LOOKAHEAD).run(found, num_rounds, at_once=2)
        assert [row.failure for row in found] == [None] * len(found)
        assert [row.output for row in found] == [row.output for row in expected]
    assert sum(accepted) > 0


def test_a_row_goes_on_elsewhere_at_any_token(loaded: LoadedRunner) -> None:
    for number in range(len(LARKS)):
        (expected,) = _outputs(loaded, [_row(number)])
        for done in range(len(expected)):
            again = dataclasses.replace(_row(number), output=expected[:done])
            assert _outputs(loaded, [again]) == [expected]


def test_output_is_free_before_the_grammar_begins(loaded: LoadedRunner) -> None:
    """The prompt does not count: only the output can begin the grammar."""
    row = _row(0, begins_after="prompt")
    assert _outputs(loaded, [row]) == _outputs(loaded, [_free(0)])


@pytest.mark.parametrize("kind", ["alone", "pipelined", "rounds"])
def test_output_does_not_end_before_the_grammar_begins(
    loaded: LoadedRunner, pipelined: LoadedRunner, kind: str
) -> None:
    """Its stop tokens are those that the model would write."""
    free = dataclasses.replace(_row(0), params=None)
    [expected] = _outputs(loaded, [free])
    definition = LLMatcher.grammar_from_lark(LARKS[0])
    for stops in (expected[:1], expected[3:9]):
        params = LogitsParams(
            stop_token_ids=np.array([*STOPS, *stops]), grammar=Grammar(definition, (*STOPS,) * 2)
        )
        row = dataclasses.replace(_row(0), params=params)
        driver = RowDriver(pipelined if kind == "pipelined" else loaded, LOOKAHEAD)
        driver.run([row], num_rounds=4 if kind == "rounds" else 1)
        assert row.failure is None
        assert len(row.output) == MAX_TOKENS
        assert not {*stops, *STOPS.tolist()} & {*row.output}
        for done in (1, 7):
            again = dataclasses.replace(_row(0), params=params, output=row.output[:done])
            assert _outputs(loaded, [again]) == [row.output]


def _context(grammars: GrammarCompiler | None) -> ProcessorContext:
    return ProcessorContext(
        vocab_size=VOCABULARY.size,
        max_num_seqs=8,
        max_model_len=64,
        device=torch.device("cpu"),
        implementation=choose("cpu", ()),
        upload=torch.tensor,
        grammars=grammars,
    )


def _admitted(folder: Path) -> tuple[GrammarProcessor, int]:
    """A processor with four rows, and the size of the vocabulary."""
    grammars, size = find_grammars(folder, VOCABULARY.size), VOCABULARY.size
    processor = GrammarProcessor(_context(grammars))
    for row in range(4):
        params = _row(row).params
        assert params is not None
        assert processor.admit(row, params, np.array(DIGITS), len(DIGITS))
    return processor, size


def _sampled(folder: Path, begun: list[int] | None) -> torch.Tensor:
    """The tokens of a few steps of four rows; masks of the rows `begun` are begun before some."""
    processor, size = _admitted(folder)
    rows = np.arange(4)
    outputs = []
    for step in range(6):
        if step % 3 == 1 and begun:
            # This step fails, and another one follows.
            processor.begin_apply(rows[:1])
        if step % 3 and begun:
            processor.begin_apply(np.array(begun))
        logits = torch.arange(4.0 * size).view(4, size).mul_(step + 1).sin_()
        processor.apply(logits, rows, rows)
        outputs.append(logits.argmax(-1))
        processor.append(outputs[-1], rows, rows)
    return torch.stack(outputs)


@pytest.mark.parametrize("begun", [[0, 1, 2, 3], [0, 1], [1, 2, 3]])
def test_masks_begun_beside_the_forward_pass_change_no_token(
    folder: Path, begun: list[int]
) -> None:
    assert _sampled(folder, begun).equal(_sampled(folder, None))


def test_masks_may_be_begun_for_more_rows_than_sample(folder: Path) -> None:
    changed = []
    for begins in (False, True):
        processor, size = _admitted(folder)
        rows = np.array([3, 1])
        if begins:
            processor.begin_apply(np.arange(4))
        logits = torch.ones(2, size)
        processor.apply(logits, np.arange(2), rows)
        changed.append(logits)
    assert changed[0].equal(changed[1])
    assert not changed[0][0].equal(changed[0][1])


def test_a_row_is_released_though_its_masks_have_failed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of it would be that of the row's next sequence."""
    processor, size = _admitted(folder)
    rows = np.arange(4)
    processor.apply(torch.ones(4, size), rows, rows)

    def fail(self: TokenMasks, work: MaskWork) -> None:
        raise KeyError("fill")

    monkeypatch.setattr(TokenMasks, "fill", fail)
    processor.begin_apply(rows)
    with pytest.raises(KeyError, match="fill"):
        processor.release(0)
    assert not {0} & (processor._rows.keys() | processor._beginnings.keys())
    processor.release(1)


def test_rows_without_grammars_are_not_changed(loaded: LoadedRunner) -> None:
    free = [dataclasses.replace(_row(number), params=None) for number in range(2)]
    expected = _outputs(loaded, free)
    mixed = [dataclasses.replace(_row(0), params=None), _row(1)]
    RowDriver(loaded).run(mixed)
    assert mixed[0].output == expected[0]


def test_an_invalid_grammar_fails_its_row_alone(loaded: LoadedRunner) -> None:
    wrong = dataclasses.replace(
        _row(0), params=LogitsParams(stop_token_ids=STOPS, grammar=Grammar("start: missing"))
    )
    rows = [wrong, _row(1)]
    RowDriver(loaded).run(rows)
    assert rows[0].failure is not None
    assert rows[0].failure.message.startswith("is refused: ")
    assert rows[0].failure.invalid_field == InvalidField(Grammar.field, "INVALID_FORMAT")
    assert rows[1].failure is None


def test_a_panic_of_the_library_fails_its_row_alone(
    driver: RowDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        """As pyo3's."""

    compile_ = GrammarVocabulary.compile

    def panic(used: GrammarVocabulary, definition: str, *arguments: int) -> LLMatcher:
        if definition == "panic":
            raise PanicException("index out of bounds")
        return compile_(used, definition, *arguments)

    monkeypatch.setattr(GrammarVocabulary, "compile", panic)
    params = LogitsParams(stop_token_ids=STOPS, grammar=Grammar("panic"))
    rows = [dataclasses.replace(_row(0), params=params), _row(1), _free(2)]
    driver.run(rows)
    refused = InvalidField(FIELD, "INVALID_FORMAT")
    assert rows[0].failure == RowFailure("is refused: index out of bounds", refused)
    assert [row.failure for row in rows[1:]] == [None, None]
    assert rows[1].is_finished


def test_a_grammar_without_a_stop_token_fails_at_its_end(loaded: LoadedRunner) -> None:
    row = _contradicting('start: "a"', stop_token_ids=np.empty(0, np.int64))
    RowDriver(loaded).run([row])
    assert row.output == TOKENIZER.encode("a").ids
    assert row.failure is not None
    assert row.failure.invalid_field == InvalidField(FIELD, "NO_POSSIBLE_TOKEN")


def _contradicting(lark: str = "start: /[0-9]{3}/", **changes: Any) -> GuidedRow:
    grammar = Grammar(LLMatcher.grammar_from_lark(lark))
    params = LogitsParams(**{"stop_token_ids": STOPS, "grammar": grammar, **changes})
    return GuidedRow(TOKENIZER.encode("prompt").ids, params, seed=1, max_tokens=MAX_TOKENS)


# Of each, the output before it fails, the field that is named, and a part of the message.
CONTRADICTIONS = {
    "allowed": (
        _contradicting(allowed_token_ids=np.array([*TOKENIZER.encode("xyz").ids, *STOPS])),
        0,
        InvalidField("sampling_params.allowed_token_ids.ids", "NO_POSSIBLE_TOKEN"),
        "excludes together with the format of the output every token",
    ),
    "no end": (
        _contradicting(allowed_token_ids=np.array(DIGITS)),
        3,
        InvalidField("sampling_params.allowed_token_ids.ids", "NO_POSSIBLE_TOKEN"),
        "a format needs its tokens, and a stop token at its end",
    ),
    "bad words": (
        _contradicting(
            'start: "a" /[xy]/',
            bad_words=tuple(np.array(TOKENIZER.encode(word).ids) for word in ("x", "y")),
        ),
        1,
        InvalidField("sampling_params.bad_words", "NO_POSSIBLE_TOKEN"),
        "excludes together with the format",
    ),
    "stop tokens": (
        _contradicting('start: "a" /[0-9]/', stop_token_ids=np.array([*STOPS, *DIGITS])),
        1,
        InvalidField("sampling_params.stop_token_ids", "NO_POSSIBLE_TOKEN"),
        "stop tokens are no part of a format",
    ),
    "special stop token": (
        _contradicting('start: "a" <|end|> "b"'),
        1,
        InvalidField(FIELD, "NO_POSSIBLE_TOKEN"),
        "needs the special token <|end|>, which ends the output",
    ),
    "limit": (
        _contradicting('start: "a" (' + " | ".join(f'"{n} "' for n in range(3000)) + ")+"),
        1,
        InvalidField(FIELD, "FORMAT_TOO_COMPLEX"),
        "reached a limit of the grammar library in the middle of the output",
    ),
}


@pytest.mark.parametrize("kind", ["alone", "pipelined", "rounds"])
@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_request_that_contradicts_itself_is_named_as_the_cause(
    loaded: LoadedRunner, pipelined: LoadedRunner, name: str, kind: str
) -> None:
    row, num_tokens, field, message = CONTRADICTIONS[name]
    row, neighbour = dataclasses.replace(row, output=[]), _row(1)
    driver = RowDriver(pipelined if kind == "pipelined" else loaded)
    driver.run([row, neighbour], num_rounds=4 if kind == "rounds" else 1)
    assert row.failure is not None
    assert row.failure.invalid_field == field
    assert message in row.failure.message
    assert len(row.output) == num_tokens or kind == "rounds"
    assert neighbour.failure is None
    assert neighbour.is_finished


def test_a_limit_that_was_reached_elsewhere_is_the_same_failure(loaded: LoadedRunner) -> None:
    """The worker that sampled the last token was lost before the next one."""
    row, *_ = CONTRADICTIONS["limit"]
    there = dataclasses.replace(row, output=[])
    RowDriver(loaded).run([there])
    again = dataclasses.replace(row, output=[*there.output])
    RowDriver(loaded).run([again])
    assert again.failure == there.failure


def _drawn(compiler: GrammarCompiler, seeds: list[int], num_tokens: int = 40) -> torch.Tensor:
    """Random tokens of rows that share a grammar, whose lexer needs new states at most of them."""
    size = VOCABULARY.size
    processor = GrammarProcessor(_context(compiler))
    definition = LLMatcher.grammar_from_lark(r"start: /(.*[a-m].{8}[n-z].{6})+/")
    rows = np.arange(len(seeds))
    for row in rows.tolist():
        params = LogitsParams(stop_token_ids=STOPS, grammar=Grammar(definition))
        assert processor.admit(row, params, np.array(DIGITS), len(DIGITS))
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    outputs = []
    for _ in range(num_tokens):
        logits = torch.stack([torch.rand(size, generator=one) for one in generators])
        processor.apply(logits, rows, rows)
        outputs.append(logits.argmax(-1))
        processor.append(outputs[-1], rows, rows)
    return torch.stack(outputs, 1)


def test_states_of_other_rows_do_not_count_for_a_row() -> None:
    """All rows of a kept grammar share a lexer, which keeps the states of their outputs."""
    seeds = list(range(8))
    expected = _drawn(GrammarCompiler(VOCABULARY), seeds)
    assert len({tuple(tokens) for tokens in expected.tolist()}) == len(seeds)
    limited = GrammarCompiler(VOCABULARY, max_shared_states=MANY_STATES)
    assert _drawn(limited, seeds[:4]).equal(expected[:4])
    for seed in seeds[4:]:
        assert _drawn(limited, [seed]).equal(expected[seed : seed + 1])


@pytest.fixture(params=["alone", "beside another"])
def is_alone(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "alone")


@pytest.fixture(params=["synchronous", "pipelined"])
def driver(
    request: pytest.FixtureRequest, loaded: LoadedRunner, pipelined: LoadedRunner
) -> RowDriver:
    """Gives rows look-ahead, as schedulers do."""
    return RowDriver(loaded if request.param == "synchronous" else pipelined, LOOKAHEAD)


@pytest.fixture
def compiled(driver: RowDriver, monkeypatch: pytest.MonkeyPatch) -> Future[LLMatcher]:
    """In place of any grammar of the driver's worker."""
    future = Future[LLMatcher]()
    runner: Any = driver._loaded.runner
    [processor] = getattr(runner, "runner", runner)._processors._preparing
    monkeypatch.setattr(processor._compiler, "prepare", lambda definition: future)
    monkeypatch.setattr(driver, "_loaded", dataclasses.replace(driver._loaded, on_arrival=no_op))
    return future


def test_a_row_waits_for_its_grammar_and_others_go_on(
    loaded: LoadedRunner, driver: RowDriver, compiled: Future[LLMatcher], is_alone: bool
) -> None:
    late, free = _row(0), dataclasses.replace(_row(1), params=None)
    beside = {} if is_alone else {1: free}
    for index, row in beside.items():
        driver.start(index, row)
    driver.start(0, late, beside=beside)
    for _ in range(3):
        driver.step({0: late, **beside})
    assert late.output == []
    assert len(free.output) == (0 if is_alone else 5)
    assert late.params is not None
    assert late.params.grammar is not None
    compiled.set_result(VOCABULARY.compile(late.params.grammar.definition))
    while not late.has_ended:
        driver.step({0: late, **beside})
    driver.release([0, *beside])
    assert late.failure is None
    assert late.is_finished
    undisturbed = [_row(0), dataclasses.replace(_row(1), params=None)]
    RowDriver(dataclasses.replace(loaded, runner=loaded.runner)).run(undisturbed)
    assert late.output == undisturbed[0].output
    assert free.output == undisturbed[1].output[: len(free.output)]


def test_a_grammar_that_is_refused_late_fails_its_row(
    driver: RowDriver, compiled: Future[LLMatcher], is_alone: bool
) -> None:
    late, free = _row(0), dataclasses.replace(_row(1), params=None)
    beside = {} if is_alone else {1: free}
    for index, row in beside.items():
        driver.start(index, row)
    driver.start(0, late, beside=beside)
    compiled.set_exception(GrammarError("too large"))
    driver.step({0: late, **beside})
    driver.release([0, *beside])
    assert late.failure == RowFailure(
        "is refused: too large", InvalidField(Grammar.field, "INVALID_FORMAT")
    )
    assert free.failure is None


@pytest.fixture(scope="module")
def pipelined(loaded: LoadedRunner, folder: Path) -> LoadedRunner:
    return dataclasses.replace(loaded, runner=_pipelined(folder))


@pytest.mark.parametrize("ahead", [False, True])
def test_pipelined_steps_give_the_same_tokens(
    loaded: LoadedRunner, pipelined: LoadedRunner, ahead: bool
) -> None:
    """A step samples after the tokens of the previous one, which is read later."""
    expected = _outputs(loaded, [_row(number) for number in range(8)])
    rows = [_row(number) for number in range(8)]
    driver = RowDriver(pipelined)
    (driver.run_ahead if ahead else driver.run)(rows)
    assert [row.failure for row in rows] == [None] * 8
    assert [row.output for row in rows] == expected


def _pipelined(folder: Path) -> PipelinedRunner:
    loaded = load_runner(worker_settings(folder, num_blocks=400))
    assert isinstance(loaded.runner, MultiStepRunner)
    runner = loaded.runner.runner
    assert isinstance(runner, Runner)
    return start_pipelined(
        runner._model,
        runner._pool,
        runner._attention,
        runner._tables,
        runner._implementation,
        HostStreams(),
        HostCapturer(),
        grammars=find_grammars(folder, TOKENIZER.get_vocab_size() + 5),
    )
