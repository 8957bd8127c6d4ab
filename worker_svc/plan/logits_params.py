"""How the logits of a sequence are changed before a token is sampled."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Self

import numpy as np
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct, Value
from numpy.typing import NDArray

from quire.internal.v1 import logits_pb2
from worker_svc.plan.inputs import Ints


def _no_tokens() -> Ints:
    return np.empty(0, np.int64)


def _no_biases() -> NDArray[np.float32]:
    return np.empty(0, np.float32)


@dataclass(frozen=True)
class Grammar:
    """A grammar that the output follows."""

    definition: str  # as the grammar library reads it
    begins_after_token_ids: tuple[int, ...] = ()  # the output is free up to these; empty: guided
    field: str = "sampling_params.structured_output"  # the request's, as errors name it
    principal: str = ""  # whose grammar it is: principals share the threads that compile


@dataclass(frozen=True)
class LogitsParams:
    """Parameters of the logits processors; by default none of them changes anything."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: Ints = field(default_factory=_no_tokens)
    bias_token_ids: Ints = field(default_factory=_no_tokens)
    biases: NDArray[np.float32] = field(default_factory=_no_biases)  # parallel
    allowed_token_ids: Ints = field(default_factory=_no_tokens)  # all if there are none
    bad_words: tuple[Ints, ...] = ()  # sequences of tokens
    processed_logprobs: bool = False
    typical_p: float = 1.0
    grammar: Grammar | None = None
    processor_args: Mapping[str, Any] = field(default_factory=dict)  # JSON values

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """ValueError for bytes that are no valid message."""
        try:
            message = logits_pb2.LogitsParams.FromString(data)
        except DecodeError as error:
            raise ValueError(str(error)) from error
        if len(message.bias_token_ids) != len(message.biases):
            raise ValueError("bias_token_ids and biases differ in length")
        lengths = message.bad_words_lengths
        if sum(lengths) != len(message.bad_words_token_ids):
            raise ValueError("bad_words_lengths do not add up to bad_words_token_ids")
        words = np.array(message.bad_words_token_ids, np.int64)
        ends = accumulate(lengths, initial=0)
        return cls(
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            repetition_penalty=message.repetition_penalty or 1.0,
            min_tokens=message.min_tokens,
            stop_token_ids=np.array(message.stop_token_ids, np.int64),
            bias_token_ids=np.array(message.bias_token_ids, np.int64),
            biases=np.array(message.biases, np.float32),
            allowed_token_ids=np.array(message.allowed_token_ids, np.int64),
            bad_words=tuple(words[first:end] for first, end in pairwise(ends)),
            processed_logprobs=message.processed_logprobs,
            typical_p=message.typical_p or 1.0,
            grammar=_grammar(message),
            processor_args=_json_of(message.processor_args),
        )

    def to_bytes(self) -> bytes:
        """The inverse of `from_bytes`; the same parameters give the same bytes."""
        message = logits_pb2.LogitsParams(
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            # As absent fields, which they are then.
            repetition_penalty=0.0 if self.repetition_penalty == 1 else self.repetition_penalty,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids.tolist(),
            bias_token_ids=self.bias_token_ids.tolist(),
            biases=self.biases.tolist(),
            allowed_token_ids=self.allowed_token_ids.tolist(),
            bad_words_token_ids=[token for word in self.bad_words for token in word.tolist()],
            bad_words_lengths=[len(word) for word in self.bad_words],
            processed_logprobs=self.processed_logprobs,
            typical_p=0.0 if self.typical_p == 1 else self.typical_p,
        )
        if self.grammar is not None:
            message.grammar.definition = self.grammar.definition
            message.grammar.begins_after_token_ids.extend(self.grammar.begins_after_token_ids)
            message.grammar.field = self.grammar.field
            message.grammar.principal = self.grammar.principal
        if self.processor_args:
            message.processor_args.update(dict(self.processor_args))
        return message.SerializeToString(deterministic=True)


def _json_of(values: Struct) -> dict[str, Any]:
    """JSON values, and numbers that are not finite: a row with such arguments is the matter of its
    processors, while an error here would end the plan of all rows."""

    def plain(value: Value) -> Any:
        match value.WhichOneof("kind"):
            case None | "null_value":
                return None
            case "struct_value":
                return _json_of(value.struct_value)
            case "list_value":
                return [plain(item) for item in value.list_value.values]
            case kind:
                return getattr(value, kind)

    return {name: plain(value) for name, value in values.fields.items()}


def _grammar(message: logits_pb2.LogitsParams) -> Grammar | None:
    if not message.HasField("grammar"):
        return None
    found = message.grammar
    begins_after = tuple(found.begins_after_token_ids)
    # Requests recorded by an older version have no field.
    return Grammar(found.definition, begins_after, found.field or Grammar.field, found.principal)
