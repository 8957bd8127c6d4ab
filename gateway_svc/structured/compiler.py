"""Converts formats into grammars, and compiles these in threads to find what is refused."""

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import structlog
from llguidance import LLMatcher
from tokenizers import Tokenizer

from gateway_svc.structured.errors import FormatError
from gateway_svc.structured.fair_threads import FairThreads
from gateway_svc.structured.first_tokens import FirstTokens
from gateway_svc.structured.json_schemas import read_schema, to_definition
from gateway_svc.structured.lark import choice_to_lark, grammar_to_lark, regex_to_lark
from gateway_svc.structured.lark_source import LarkSource
from gateway_svc.structured.schema_errors import explain, shown_reason
from gateway_svc.structured.structural_tags import structural_tag_to_lark
from quire.service.errors import RequestError, invalid
from quire.service.grammars import (
    GrammarError,
    GrammarVocabulary,
    NoGrammarsError,
    compiler_threads,
)
from quire.v1 import structured_output_pb2

log = structlog.get_logger()

MAX_FORMAT_BYTES: Final = 2**17
# Of the processor, for compiling. The worker needs as long, beside its steps.
MAX_COMPILE_S: Final = 0.25
_MAX_FORMATS: Final = 512
_MAX_KEPT_BYTES: Final = 2**23
# A client that sends a refused format again gets the same error, without another compilation.
_MAX_REFUSALS: Final = 1024
# The time that a format takes differs.
_REFUSED_S: Final = 60
_NUM_THREADS: Final = 2
_WITHOUT_TEXT: Final = "it matches no text"


@dataclass(frozen=True)
class CompiledFormat:
    """A format that workers can follow."""

    definition: str  # of its grammar
    first_tokens: FirstTokens
    has_initial_skip: bool = False  # as in `LarkSource`

    @property
    def num_bytes(self) -> int:
        return len(self.definition) + len(self.first_tokens.bits)


class StructuredOutputCompiler:
    """The formats of one model. Keeps the grammars used last, so that they are checked once, and
    the last refusals for a while."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Read the vocabulary, which holds the interpreter for a second for 150,000 tokens; no
        request should wait for that. If the library does not read the tokenizer, which is logged,
        all formats are refused."""
        self._vocabulary = _read_vocabulary(tokenizer, vocab_size)
        self._threads = FairThreads(compiler_threads(_NUM_THREADS, "formats"), _NUM_THREADS)
        # By format, the ones used last at the end.
        self._formats: OrderedDict[bytes, CompiledFormat] = OrderedDict()
        self._num_kept_bytes = 0
        # By hashes of the field and the format, with their times; the oldest first.
        self._refusals: OrderedDict[bytes, tuple[float, RequestError]] = OrderedDict()

    async def compile(
        self, field: str, output: structured_output_pb2.StructuredOutput, principal: str = ""
    ) -> CompiledFormat:
        """The grammar for workers. RequestError at a field within `field` if the format is
        refused. Principals are served round robin."""
        vocabulary = self._vocabulary
        if isinstance(vocabulary, NoGrammarsError):
            reason = f"is not served: the model's tokenizer is not readable ({vocabulary})"
            raise invalid(field, "NO_STRUCTURED_OUTPUT", reason)
        name = output.WhichOneof("format")
        if name is None:
            raise invalid(field, "NO_FORMAT", "has no format")
        num_bytes = output.ByteSize()
        if num_bytes > MAX_FORMAT_BYTES:
            raise invalid(
                f"{field}.{name}",
                "FORMAT_SIZE",
                f"has {num_bytes} bytes; at most {MAX_FORMAT_BYTES} are allowed",
            )
        key = output.SerializeToString(deterministic=True)
        compiled = self._known(field, key)
        if compiled is None:
            work = partial(self._compile, vocabulary, f"{field}.{name}", output)
            async with self._threads.hold(principal) as thread:
                # Others may have sent the same format at the same time.
                compiled = self._known(field, key)
                if compiled is None:
                    try:
                        compiled = await thread.run(work)
                    except RequestError as error:
                        self._remember(field, key, error)
                        raise
        self._keep(key, compiled)
        return compiled

    def _known(self, field: str, key: bytes) -> CompiledFormat | None:
        """The format if it was compiled; RequestError if it was refused lately."""
        while self._refusals:
            oldest, (refused_s, _) = next(iter(self._refusals.items()))
            if len(self._refusals) <= _MAX_REFUSALS and time.monotonic() < refused_s + _REFUSED_S:
                break
            del self._refusals[oldest]
        compiled = self._formats.get(key)
        if compiled is None and self._refusals:
            refusal = self._refusals.get(_hash_of(field, key))
            if refusal is not None:
                # Without the traceback of others.
                raise replace(refusal[1])
        return compiled

    def _remember(self, field: str, key: bytes, error: RequestError) -> None:
        refused = _hash_of(field, key)
        self._refusals.pop(refused, None)
        self._refusals[refused] = time.monotonic(), replace(error)

    def _keep(self, key: bytes, compiled: CompiledFormat) -> None:
        """Count the format as the last one used."""
        if self._formats.pop(key, None) is None:
            self._num_kept_bytes += len(key) + compiled.num_bytes
        self._formats[key] = compiled
        while (len(self._formats) > _MAX_FORMATS or self._num_kept_bytes > _MAX_KEPT_BYTES) and len(
            self._formats
        ) > 1:
            oldest, removed = self._formats.popitem(last=False)
            self._num_kept_bytes -= len(oldest) + removed.num_bytes

    def _compile(
        self,
        vocabulary: GrammarVocabulary,
        field: str,
        output: structured_output_pb2.StructuredOutput,
    ) -> CompiledFormat:
        """In a thread."""
        name = output.WhichOneof("format")
        try:
            match name:
                case "json_schema":
                    return _compile_schema(vocabulary, field, output.json_schema)
                case "json_object":
                    return _compile_schema(vocabulary, field, '{"type": "object"}')
                case _:
                    return _compile_lark(vocabulary, field, output)
        except RecursionError as error:
            reason = "INVALID_SCHEMA" if name == "json_schema" else "INVALID_FORMAT"
            raise invalid(field, reason, "is nested too deeply") from error


def _hash_of(field: str, key: bytes) -> bytes:
    return hashlib.sha256(field.encode() + b"\0" + key).digest()


def _read_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> GrammarVocabulary | NoGrammarsError:
    """The vocabulary, or the reason why there is none."""
    try:
        return GrammarVocabulary.from_tokenizer(tokenizer, vocab_size, slices=[])
    except NoGrammarsError as error:
        log.info("no structured output", reason=str(error))
        return error


def _compile_schema(vocabulary: GrammarVocabulary, field: str, text: str) -> CompiledFormat:
    try:
        schema = read_schema(text)
        definition = to_definition(schema)
    except ValueError as error:
        raise invalid(field, "INVALID_SCHEMA", shown_reason(str(error))) from error
    try:
        return _check(vocabulary, field, definition)
    except GrammarError as error:
        reason = _explanation(vocabulary, str(error), schema)
        raise invalid(field, "UNSUPPORTED_SCHEMA", reason) from error


def _explanation(
    vocabulary: GrammarVocabulary, reason: str, schema: dict[str, Any], root: str = "#"
) -> str:
    return explain(reason, schema, lambda part: _refusal(vocabulary, part, reason), root)


def _refusal(vocabulary: GrammarVocabulary, schema: dict[str, Any], reason: str = "") -> str | None:
    """Why a schema is refused; None if it is served. With a `reason` it is what is left of one that
    is refused for it."""
    try:
        _begin(vocabulary, to_definition(schema, reason))
    except ValueError as error:
        # A ValueError: it is nested too deeply.
        return str(error)
    return None


def _compile_lark(
    vocabulary: GrammarVocabulary, field: str, output: structured_output_pb2.StructuredOutput
) -> CompiledFormat:
    try:
        source = _source(vocabulary, output)
        source.check_quantifiers()
        definition = LLMatcher.grammar_from_lark(source.text)
    except FormatError as error:
        raise invalid(field, "INVALID_FORMAT", str(error)) from error
    except ValueError as error:
        reason = f"is refused: {shown_reason(str(error))}"
        raise invalid(field, "INVALID_FORMAT", reason) from error
    try:
        compiled = _check(vocabulary, field, definition)
        return replace(compiled, has_initial_skip=source.has_initial_skip)
    except GrammarError as error:
        reason = _explain_part(vocabulary, source) or f"is refused: {shown_reason(str(error))}"
        raise invalid(field, "INVALID_FORMAT", reason) from error


def _source(
    vocabulary: GrammarVocabulary, output: structured_output_pb2.StructuredOutput
) -> LarkSource:
    match output.WhichOneof("format"):
        case "regex":
            return regex_to_lark(output.regex)
        case "choice":
            return choice_to_lark(list(output.choice.texts))
        case "grammar":
            return grammar_to_lark(output.grammar)
        case _:
            return structural_tag_to_lark(output.structural_tag, vocabulary.special_tokenizer)


def _explain_part(vocabulary: GrammarVocabulary, source: LarkSource) -> str | None:
    """Why a part of a grammar is refused on its own, with its place; None if none is."""
    started_s = time.thread_time()
    for place, schema in source.schemas.items():
        if reason := _refusal(vocabulary, schema):
            return _explanation(vocabulary, reason, schema, place)
        if time.thread_time() - started_s > MAX_COMPILE_S:
            return None
    for place, text in source.parts.items():
        try:
            _begin(vocabulary, LLMatcher.grammar_from_lark(text))
        except GrammarError as error:
            return f"is refused at {place}: {shown_reason(str(error))}"
        if time.thread_time() - started_s > MAX_COMPILE_S:
            return None
    return None


def _check(vocabulary: GrammarVocabulary, field: str, definition: str) -> CompiledFormat:
    """GrammarError if the grammar cannot be compiled or has no text, RequestError if it takes too
    long."""
    started_s = time.thread_time()
    first_tokens = _begin(vocabulary, definition)
    spent_s = time.thread_time() - started_s
    if spent_s > MAX_COMPILE_S:
        raise invalid(
            field,
            "FORMAT_TOO_COMPLEX",
            f"takes {spent_s:.2f} s to compile; at most {MAX_COMPILE_S} s are allowed",
        )
    return CompiledFormat(definition, first_tokens)


def _begin(vocabulary: GrammarVocabulary, definition: str) -> FirstTokens:
    """GrammarError if the grammar cannot be compiled, or workers could not begin with it."""
    matcher = vocabulary.compile(definition)
    bits = matcher.compute_bitmask()
    # A grammar whose forced text is too large or endless fails here.
    forced = matcher.compute_ff_tokens()
    if not any(bits) and not matcher.is_error():
        raise GrammarError(_WITHOUT_TEXT)
    first = FirstTokens.read(bits, vocabulary.end_id, forced)
    # One step further: limits are mostly reached where a large object or choice begins.
    if first.example is not None:
        matcher.consume_token(first.example)
        matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return first
