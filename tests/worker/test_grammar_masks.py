"""Masks of grammars: which tokens may follow, and where the output may end."""

import json
import random
import re
import threading
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grammar_tokenizers import ADDED, SPECIAL, byte_fallback, byte_level
from llguidance import LLMatcher
from structlog.testing import capture_logs
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from worker_driver import Sequence, admit

from quire.internal.v1 import worker_pb2
from quire.service.grammars import GrammarError, GrammarVocabulary, NoGrammarsError
from worker_svc.grammar import compiler as compiler_module
from worker_svc.grammar.compiler import GrammarCompiler, find_grammars
from worker_svc.grammar.masks import TokenMasks
from worker_svc.grammar.row_grammar import RowGrammar
from worker_svc.plan.inputs import Ints
from worker_svc.plan.logits_params import Grammar, LogitsParams
from worker_svc.plan.plans import plan_from_proto

NO_STOPS: Ints = np.empty(0, np.int64)


class Guide:
    """Grammars over one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, padding: int = 0) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size() + padding
        self.vocabulary = GrammarVocabulary.from_tokenizer(tokenizer, self.vocab_size)
        self.compiler = GrammarCompiler(self.vocabulary)
        self.masks = TokenMasks(self.vocabulary, self.vocab_size, 8, num_threads=2)

    def row(
        self, lark: str, stops: Ints = NO_STOPS, begins_after: tuple[int, ...] = ()
    ) -> RowGrammar:
        definition = LLMatcher.grammar_from_lark(lark)
        matcher = self.compiler.prepare(Grammar(definition)).result().deep_copy()
        return RowGrammar(matcher, begins_after, stops.tolist(), self.vocabulary.end_id)

    def possible(self, row: RowGrammar) -> set[int]:
        bits = self.masks.compute([row])
        unpacked = np.unpackbits(bits[0].view(np.uint8), bitorder="little")[: self.vocab_size]
        return set(unpacked.nonzero()[0].tolist())

    def texts(self, row: RowGrammar) -> set[str]:
        return {str(self.tokenizer.id_to_token(id_)) for id_ in self.possible(row)}

    def write(self, row: RowGrammar, text: str) -> None:
        for token_id in self.tokenizer.encode(text, add_special_tokens=False).ids:
            row.append(token_id)


@pytest.fixture(scope="module")
def guide() -> Guide:
    return Guide(byte_level(), padding=7)


def _id(guide: Guide, token: str) -> int:
    token_id = guide.tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


def _stops(guide: Guide) -> Ints:
    return np.array([guide.tokenizer.token_to_id(text) for text in SPECIAL])


def test_tokens_that_continue_the_grammar_are_possible(guide: Guide) -> None:
    row = guide.row('start: "x" /[ab]+/ "y"')
    assert guide.texts(row) == {"x"}
    guide.write(row, "x")
    assert guide.texts(row) == {"a", "b", "ab"}
    guide.write(row, "ab")
    assert guide.texts(row) == {"a", "b", "ab", "y"}


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_masks_are_the_same_alone_and_together(guide: Guide, num_threads: int) -> None:
    shared = TokenMasks(guide.vocabulary, guide.vocab_size, 8, num_threads)
    rows = [guide.row(f'start: "x" /[ab]{{{count}}}/ "y"') for count in range(1, 9)]
    for row in rows[::2]:
        guide.write(row, "xa")
    expected = [guide.masks.compute([row])[0].copy() for row in rows]
    assert (shared.compute(rows) == np.stack(expected)).all()


def test_stop_tokens_are_possible_where_the_grammar_may_end_and_nowhere_else(guide: Guide) -> None:
    stops = _stops(guide)
    row = guide.row('start: "x" /[ab]{1,2}/', stops)
    assert guide.texts(row) == {"x"}
    guide.write(row, "xa")
    assert guide.texts(row) == {"a", "b", *SPECIAL}
    guide.write(row, "b")
    assert guide.texts(row) == set(SPECIAL)
    row.append(int(stops[1]))
    assert row.has_ended
    # Steps that were in flight when the sequence ended.
    assert guide.texts(row) == set(SPECIAL)
    row.append(int(stops[0]))
    assert row.error is None


def test_a_stop_token_with_a_text_is_possible_at_the_end_alone(guide: Guide) -> None:
    stops = np.array([guide.tokenizer.token_to_id("b")])
    row = guide.row("start: /[ab]+/", stops)
    assert guide.texts(row) == {"a", "ab"}
    guide.write(row, "a")
    assert guide.texts(row) == {"a", "ab", "b"}


def test_special_tokens_and_padded_ids_are_in_no_text(guide: Guide) -> None:
    row = guide.row(r"start: /(.|\n)*/")
    possible = guide.possible(row)
    assert max(possible) < guide.tokenizer.get_vocab_size()
    assert not possible & set(_stops(guide).tolist())
    added = guide.tokenizer.token_to_id(ADDED)
    assert added not in possible
    assert guide.possible(guide.row(f"start: <[{added}]>")) == {added}
    assert guide.possible(guide.row(f"start: <[{guide.vocab_size - 1}]>")) == set()


TEXTS_OF_SPECIAL_TOKENS = (
    SPECIAL[0],
    f"x{SPECIAL[0]}y{SPECIAL[1]}{ADDED}",
    f"<{SPECIAL[0]}>é<s></s>",
)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_the_text_of_a_special_token_is_spelled_by_ordinary_ones(
    make: Callable[[], Tokenizer],
) -> None:
    guide = Guide(make(), padding=3)
    tokenizer = guide.vocabulary.tokenizer
    names = [*SPECIAL, ADDED, "<s>", "</s>"]
    special = set(map(guide.tokenizer.token_to_id, names)) - {None}
    stops = np.array([*special])
    for text in TEXTS_OF_SPECIAL_TOKENS:
        schemas: list[dict[str, Any]] = [{"const": text}, {"enum": [text, "zz"]}]
        for definition in (
            *(LLMatcher.grammar_from_json_schema(json.dumps(schema)) for schema in schemas),
            LLMatcher.grammar_from_lark(f"start: {json.dumps(text, ensure_ascii=False)}"),
            LLMatcher.grammar_from_regex(re.escape(text)),
        ):
            matcher = guide.compiler.prepare(Grammar(definition)).result().deep_copy()
            row = RowGrammar(matcher, (), stops.tolist(), guide.vocabulary.end_id)
            output: list[int] = []
            while not row.has_ended:
                assert len(output) < 200
                # In the place of a choice, the text and not "zz".
                possible = sorted(
                    guide.possible(row), key=lambda one: tokenizer.decode_bytes([one])
                )
                output.append(possible[0])
                row.append(output[-1])
            assert not special & {*output[:-1]}
            written = tokenizer.decode_bytes(output[:-1]).decode()
            assert written in (text, json.dumps(text, ensure_ascii=False))


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_other_texts_have_the_tokens_of_the_model_s_tokenizer(
    make: Callable[[], Tokenizer],
) -> None:
    vocabulary = Guide(make(), padding=3).vocabulary
    plain, special = vocabulary.tokenizer, vocabulary.special_tokenizer
    for text in ("", "a", ' ab {"one": "trone"} ', "é€ <|en", "<|end>|", "a  b\n"):
        assert plain.tokenize_str(text) == special.tokenize_str(text)
    assert plain.vocab_size == special.vocab_size
    for token_id in range(plain.vocab_size):
        assert plain.decode_bytes([token_id]) == special.decode_bytes([token_id])
        assert plain.is_special_token(token_id) == special.is_special_token(token_id)


def test_the_bit_of_the_end_does_not_reach_the_model(guide: Guide) -> None:
    """Where the tokenizer has as many tokens as the model, it is behind the last of them."""
    tokenizer = byte_level()
    # 256 bytes, 6 pairs and 3 added tokens; up to a multiple of 32.
    tokenizer.add_tokens([f"token {at}" for at in range(288 - tokenizer.get_vocab_size())])
    exact = Guide(tokenizer)
    assert exact.vocab_size == 288
    assert exact.vocabulary.end_id == 288
    stops = _stops(exact)
    row = exact.row('start: "a"?', stops)
    bits = exact.masks.compute([row])
    assert bits.shape == (1, 9)
    assert exact.texts(row) == {"a", *SPECIAL}


def test_output_is_free_up_to_a_sequence_of_tokens(guide: Guide) -> None:
    begin = tuple(guide.tokenizer.encode("yx").ids)
    row = guide.row('start: "a"', begins_after=begin)
    assert len(guide.possible(row)) == guide.vocab_size
    guide.write(row, "aayyy")
    assert row.is_free
    guide.write(row, "x")
    assert guide.texts(row) == {"a"}


def test_no_stop_token_is_possible_before_the_grammar_begins(guide: Guide) -> None:
    """The end of the reasoning is that of no output, unless the empty text has the format."""
    stops, begin = _stops(guide), tuple(guide.tokenizer.encode("yx").ids)
    everything = set(range(guide.vocab_size))
    row = guide.row('start: "a"', stops, begin)
    assert guide.possible(row) == everything - set(stops.tolist())
    guide.write(row, "aayyy")
    assert guide.possible(row) == everything - set(stops.tolist())
    guide.write(row, "x")
    assert guide.texts(row) == {"a"}
    for lark in ('start: "a"?', r"start: /(.|\n)*/", 'start: TEXT ("<" "a" TEXT)*\nTEXT: /[^<]*/'):
        assert guide.possible(guide.row(lark, stops, begin)) == everything


def test_a_token_that_the_grammar_refuses_is_an_error(guide: Guide) -> None:
    row = guide.row('start: "x"')
    guide.write(row, "y")
    assert row.error is not None
    assert guide.possible(row) == set()


def test_forced_tokens_are_the_only_possible_ones(guide: Guide) -> None:
    row = guide.row('start: "{\\"true" ("e"|"s")')
    written = []
    while row.forced:
        expected = list(row.forced)
        assert guide.possible(row) == {expected[0]}
        row.append(expected[0])
        written.append(expected[0])
        assert not row.forced or list(row.forced) == expected[1:]
    assert guide.tokenizer.decode(written).startswith('{"tr')
    assert guide.tokenizer.id_to_token(written[0]) == '{"'


def test_state_is_a_function_of_the_tokens(guide: Guide) -> None:
    """A sequence that is admitted again at any token has the same possible and forced tokens."""
    stops = _stops(guide)
    lark = 'start: "{\\"" /[a-z]{2,4}/ "\\":true," item* "}"\nitem: "true" | /[0-9]/ | <tool_call>'
    generator = random.Random(0)
    for _ in range(5):
        row, output = guide.row(lark, stops), list[int]()
        while not row.has_ended:
            possible = guide.possible(row)
            again = guide.row(lark, stops)
            for token_id in output:
                again.append(token_id)
            assert guide.possible(again) == possible
            assert again.forced == row.forced
            output.append(generator.choice(sorted(possible)))
            row.append(output[-1])


def test_rows_have_the_masks_that_they_have_alone(guide: Guide) -> None:
    stops = _stops(guide)
    larks = ['start: "x"', "start: /[ab]*/", 'start: "{\\"" /a+/', r"start: /[^\x00-\x20]+/"]
    alone = [guide.possible(guide.row(lark, stops)) for lark in larks]
    free = guide.row('start: "x"', begins_after=(1,))
    rows = [*(guide.row(lark, stops) for lark in larks), free]
    bits = guide.masks.compute(rows)
    together = [
        set(np.unpackbits(line.view(np.uint8), bitorder="little")[: guide.vocab_size].nonzero()[0])
        for line in bits
    ]
    assert together[:-1] == alone
    assert len(together[-1]) == guide.vocab_size


def test_tokenizers_with_byte_fallback() -> None:
    guide = Guide(byte_fallback(), padding=3)
    row = guide.row('start: " a" /é/')
    assert guide.texts(row) == {"▁a"}
    row.append(_id(guide, "▁a"))
    assert guide.texts(row) == {"<0xC3>"}
    row.append(_id(guide, "<0xC3>"))
    assert guide.texts(row) == {"<0xA9>"}


def test_a_tokenizer_without_bytes_is_refused() -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(NoGrammarsError, match="decoder"):
        GrammarVocabulary.from_tokenizer(tokenizer, 2)


def test_a_tokenizer_at_which_the_library_panics_is_refused() -> None:
    tokenizer = byte_fallback()
    content = json.loads(tokenizer.to_str())
    # A name that begins as that of a byte.
    content["model"]["vocab"]["<0xNOBYTE"] = tokenizer.get_vocab_size()
    panicking = Tokenizer.from_str(json.dumps(content))
    with pytest.raises(NoGrammarsError):
        GrammarVocabulary.from_tokenizer(panicking, 400)


def test_the_compiler_keeps_the_grammars_used_last(guide: Guide) -> None:
    compiler = GrammarCompiler(guide.vocabulary, max_grammars=2)
    a, b, c = (Grammar(LLMatcher.grammar_from_lark(f'start: "{text}"')) for text in "abc")
    first = compiler.prepare(a)
    compiler.prepare(b)
    assert compiler.prepare(a) is first
    compiler.prepare(c)
    assert len(compiler) == 2
    assert compiler.prepare(a) is first


def test_large_grammars_are_kept_up_to_a_size(guide: Guide) -> None:
    """A compiled grammar takes up to a hundred times as much memory as its definition."""
    compiler = GrammarCompiler(guide.vocabulary, max_kept_characters=1500)
    grammars = [Grammar(LLMatcher.grammar_from_lark(f'start: "{at}{"x" * 600}"')) for at in "abc"]
    first, second, third = (compiler.prepare(grammar) for grammar in grammars)
    assert len(compiler) == 2
    assert compiler.prepare(grammars[1]) is second
    assert compiler.prepare(grammars[2]) is third
    assert compiler.prepare(grammars[0]) is not first
    # The one used last is kept in any case.
    compiler.prepare(Grammar(LLMatcher.grammar_from_lark(f'start: "{"x" * 3000}"')))
    assert len(compiler) == 1


def test_a_grammar_whose_states_are_used_up_is_not_kept(guide: Guide) -> None:
    compiler = GrammarCompiler(guide.vocabulary)
    grammar = Grammar(LLMatcher.grammar_from_lark('start: "a"'))
    used_up = compiler.prepare(grammar)
    alone = compiler.prepare_alone(grammar.definition, used_up)
    shared = compiler.prepare(grammar)
    assert len({used_up, alone, shared}) == 3
    # Another row notices it later.
    compiler.prepare_alone(grammar.definition, used_up)
    assert compiler.prepare(grammar) is shared


def _held_compiler(
    guide: Guide, monkeypatch: pytest.MonkeyPatch, **options: int
) -> tuple[GrammarCompiler, list[str], threading.Event, threading.Event]:
    """A compiler of one thread, the definitions that it has compiled, and events: it has begun, and
    it may go on."""
    monkeypatch.setattr(compiler_module, "_NUM_THREADS", 1)
    vocabulary = replace(guide.vocabulary)
    compiled, has_begun, may_go_on = list[str](), threading.Event(), threading.Event()

    def compile_when_allowed(
        used: GrammarVocabulary, definition: str, max_lexer_states: int | None = None
    ) -> LLMatcher:
        # Threads of other tests' compilers may still have work.
        if used is vocabulary:
            has_begun.set()
            may_go_on.wait()
            compiled.append(definition)
        return LLMatcher(used.tokenizer, definition)

    monkeypatch.setattr(GrammarVocabulary, "compile", compile_when_allowed)
    return GrammarCompiler(vocabulary, **options), compiled, has_begun, may_go_on


def test_what_is_not_kept_and_no_row_waits_for_is_not_compiled(
    guide: Guide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of requests that are cancelled faster than their grammars compile."""
    compiler, compiled, has_begun, may_go_on = _held_compiler(guide, monkeypatch, max_grammars=2)
    grammars = [Grammar(LLMatcher.grammar_from_lark(f'start: "{text}"')) for text in "abcdef"]
    compiler.prepare(grammars[0])
    assert has_begun.wait(10)
    waited_for = compiler.prepare(grammars[1])
    kept = [compiler.prepare(grammar) for grammar in grammars[2:]][-2:]
    may_go_on.set()
    wait([waited_for, *kept], 10)
    assert compiled == [grammars[at].definition for at in (0, 1, 4, 5)]


def test_principals_are_served_round_robin(guide: Guide, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that several of them need is compiled once, when the first one is served."""
    compiler, compiled, has_begun, may_go_on = _held_compiler(guide, monkeypatch)
    waiting = [("x", "0"), ("x", "1"), ("x", "2"), ("x", "3"), ("y", "3"), ("y", "4"), ("z", "5")]
    grammars = [
        Grammar(LLMatcher.grammar_from_lark(f'start: "{text}"'), principal=principal)
        for principal, text in waiting
    ]
    prepared = [compiler.prepare(grammars[0])]
    assert has_begun.wait(10)
    prepared += [compiler.prepare(grammar) for grammar in (*grammars[1:], grammars[0])]
    may_go_on.set()
    wait(prepared, 10)
    order = [grammars[at].definition for at in (0, 1, 4, 6, 2, 5)]
    assert compiled == order
    assert prepared[0] is prepared[-1]


def test_rows_of_one_grammar_do_not_disturb_each_other(guide: Guide) -> None:
    first, second = guide.row('start: "ax"'), guide.row('start: "ax"')
    guide.write(first, "a")
    assert guide.texts(second) == {"a"}
    assert guide.texts(first) == {"x"}


def test_a_grammar_that_cannot_be_compiled(guide: Guide) -> None:
    with pytest.raises(GrammarError):
        guide.compiler.prepare(Grammar(LLMatcher.grammar_from_lark("start: missing"))).result()


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_panic_of_the_library_is_an_error_of_its_grammar(
    guide: Guide, monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    class PanicException(BaseException):
        """As pyo3's."""

    vocabulary, compile_ = replace(guide.vocabulary), GrammarVocabulary.compile

    def panic(used: GrammarVocabulary, definition: str, *arguments: int) -> LLMatcher:
        # Threads of other tests' compilers may still have work.
        if used is vocabulary:
            raise PanicException("index out of bounds")
        return compile_(used, definition, *arguments)

    compiler, grammar = GrammarCompiler(vocabulary), Grammar('start: "panic"')
    monkeypatch.setattr(GrammarVocabulary, "compile", panic)
    with capture_logs() as logs:
        compiled = compiler.prepare(grammar)
        if is_alone:
            compiled.exception()
            logs.clear()
            compiled = compiler.prepare_alone(grammar.definition, compiled)
        with pytest.raises(GrammarError, match="index out of bounds"):
            compiled.result()
    assert [entry["event"] for entry in logs] == ["the grammar library has panicked"]


def test_models_without_a_readable_tokenizer_have_no_grammars(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    with capture_logs() as logs:
        assert find_grammars(tmp_path, 10) is None
        for text in ("{}", "[]", "", str(file), "\ud800"):
            file.write_text(text, errors="surrogatepass")
            assert find_grammars(tmp_path, 10) is None
    assert [entry["event"] for entry in logs] == ["no structured output"] * 6
    byte_level().save(str(file))
    readable = find_grammars(tmp_path, 300)
    assert readable is not None
    definition = LLMatcher.grammar_from_lark('start: "a"')
    assert readable.prepare(Grammar(definition)).result().is_accepting() is False


@pytest.mark.parametrize("pretty", [False, True])
def test_a_vocabulary_has_no_limits_of_a_training_run(tmp_path: Path, pretty: bool) -> None:
    plain = byte_level()
    limited = byte_level()
    limited.enable_truncation(2)
    limited.enable_padding(length=8)
    file = tmp_path / "tokenizer.json"
    for tokenizer in (plain, limited):
        tokenizer.save(str(file), pretty=pretty)
        for found in (
            GrammarVocabulary.from_file(file, 300),
            GrammarVocabulary.from_tokenizer(tokenizer, 300),
        ):
            for read in (found.tokenizer, found.special_tokenizer):
                assert read.tokenize_str("abcdef") == plain.encode("abcdef").ids


def test_a_vocabulary_has_spaces_for_the_marks_of_a_metaspace_decoder(tmp_path: Path) -> None:
    tokenizer = byte_fallback()
    size = tokenizer.get_vocab_size()
    plain = GrammarVocabulary.from_tokenizer(tokenizer, size).special_tokenizer
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    for found in (
        GrammarVocabulary.from_file(file, size),
        GrammarVocabulary.from_tokenizer(tokenizer, size),
    ):
        read = found.special_tokenizer
        texts = [read.decode_bytes([token_id]) for token_id in range(size)]
        assert texts == [plain.decode_bytes([token_id]) for token_id in range(size)]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("padding", [-200, -1, 0, 1, 40])
def test_the_end_is_behind_the_tokenizer_s_last_token(
    make: Callable[[], Tokenizer], padding: int
) -> None:
    """The model may have more tokens than the tokenizer, as many, or less."""
    tokenizer = make()
    num_tokens = tokenizer.get_vocab_size()
    vocabulary = GrammarVocabulary.from_tokenizer(tokenizer, num_tokens + padding)
    assert vocabulary.end_id == num_tokens
    assert vocabulary.size == num_tokens + max(padding, 1)


def test_grammars_are_compiled_when_their_plan_arrives(guide: Guide) -> None:
    compiler = GrammarCompiler(guide.vocabulary)
    message = worker_pb2.BatchPlan()
    for row, lark in enumerate(('start: "a"', None, 'start: "a"')):
        admit(message, Sequence(row, [1], 1))
        definition = "" if lark is None else LLMatcher.grammar_from_lark(lark)
        params = LogitsParams(grammar=Grammar(definition)) if lark else LogitsParams(min_tokens=1)
        message.admissions.logits_params.append(params.to_bytes())
    compiler.prepare_for(plan_from_proto(message))
    assert len(compiler) == 1


def test_rules_may_be_as_deep_as_the_size_of_a_format_allows() -> None:
    rules = [f"r{at}: r{at + 1}" for at in range(5000)]
    guide = Guide(byte_level())
    row = guide.row("\n".join(["start: r0", *rules, 'r5000: "ab" | "b"']))
    assert guide.texts(row) == {"a", "ab", "b"}
