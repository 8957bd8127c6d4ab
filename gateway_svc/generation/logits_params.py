"""Builds what changes the logits of a request, which only its worker reads.

Errors name the invalid field. Neutral values are left out, so that a request that changes nothing
has an empty message.
"""

import math
from collections.abc import Sequence

from google.protobuf.wrappers_pb2 import FloatValue

from gateway_svc.generation.field_checks import (
    check_at_most,
    check_is_json,
    check_length,
    check_token_ids,
    out_of_range,
    outside_vocabulary,
)
from gateway_svc.text.served_model import Model, ModelLimits
from quire.internal.v1 import logits_pb2
from quire.service.errors import invalid
from quire.v1 import inference_pb2

MAX_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_PROCESSOR_ARGS_BYTES = 2**14
# The plans of the scheduler contain these parameters, those of many requests at once.
MAX_BYTES = 2**18
# As long as the longest names of fields; more would take blocks that are seldom used.
MAX_LOOKAHEAD_TOKENS = 16
# Of requests that do not jump.
_WAITING_LOOKAHEAD = 1
_ALLOWED = "sampling_params.allowed_token_ids.ids"
_MAX_PENALTY = 2.0
_MAX_BIAS = 100.0
# Logits that it divides or multiplies stay finite numbers.
_REPETITION_PENALTIES = tuple(FloatValue(value=bound).value for bound in (1e-30, 1e30))


def check(params: inference_pb2.SamplingParams, vocab_size: int) -> None:
    """Check all that needs no tokenizer."""
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        if not -_MAX_PENALTY <= value <= _MAX_PENALTY:
            raise out_of_range(f"sampling_params.{name}", value, "-2 to 2")
    penalty = params.repetition_penalty
    if params.HasField("repetition_penalty") and not (math.isfinite(penalty) and penalty > 0):
        raise out_of_range("sampling_params.repetition_penalty", penalty, "above 0, and finite")
    least, most = _REPETITION_PENALTIES
    if params.HasField("repetition_penalty") and not least <= penalty <= most:
        raise out_of_range("sampling_params.repetition_penalty", penalty, "1e-30 to 1e30")
    if params.HasField("typical_p") and not 0 < params.typical_p <= 1:
        raise out_of_range("sampling_params.typical_p", params.typical_p, "above 0 and at most 1")
    if params.HasField("max_tokens") and params.min_tokens > params.max_tokens:
        raise out_of_range(
            "sampling_params.min_tokens",
            params.min_tokens,
            f"at most max_tokens = {params.max_tokens}",
        )
    modes = inference_pb2.LogprobsMode.values()
    if params.logprobs_mode not in modes:
        raise out_of_range("sampling_params.logprobs_mode", params.logprobs_mode, f"one of {modes}")
    if params.HasField("structured_output") and params.ignore_eos:
        raise invalid(
            "sampling_params.ignore_eos",
            "IGNORE_EOS_WITH_FORMAT",
            "is set with structured_output, which ends where its format ends",
        )
    _check_lists(params, vocab_size)


def _check_lists(params: inference_pb2.SamplingParams, vocab_size: int) -> None:
    field = "sampling_params.logit_bias"
    check_at_most(field, "TOO_MANY_BIASES", len(params.logit_bias), MAX_BIASES)
    for token_id, bias in params.logit_bias.items():
        if token_id >= vocab_size:
            raise outside_vocabulary(f"{field}[{token_id}]", token_id, vocab_size)
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise out_of_range(f"{field}[{token_id}]", bias, "-100 to 100")
    if params.HasField("allowed_token_ids"):
        field = _ALLOWED
        if not params.allowed_token_ids.ids:
            raise invalid(field, "NO_ALLOWED_TOKEN_IDS", "has 0 entries; at least 1 is needed")
        check_token_ids(field, params.allowed_token_ids.ids, vocab_size)
    field = "sampling_params.bad_words"
    check_at_most(field, "TOO_MANY_BAD_WORDS", len(params.bad_words), MAX_BAD_WORDS)
    for at, word in enumerate(params.bad_words):
        check_length(f"{field}[{at}]", "BAD_WORD_LENGTH", word, MAX_BAD_WORD_CHARACTERS)
        if word.isspace():
            raise invalid(
                f"{field}[{at}]", "BAD_WORD_OF_SPACES", "has only white space, which is ignored"
            )
    num_bytes = params.processor_args.ByteSize()
    field = "sampling_params.processor_args"
    check_at_most(field, "PROCESSOR_ARGS_SIZE", num_bytes, MAX_PROCESSOR_ARGS_BYTES, "bytes")
    check_is_json(field, params.processor_args)


def num_lookahead_tokens(params: logits_pb2.LogitsParams) -> int:
    """Tokens that a worker may append without sampling them, where the grammar leaves no choice.
    Where something else may exclude them it appends none; with look-ahead such a row can wait for
    its grammar all the same."""
    if not params.HasField("grammar"):
        return 0
    others = params.allowed_token_ids or params.bad_words_token_ids
    is_forcing = not (others or params.HasField("processor_args"))
    return MAX_LOOKAHEAD_TOKENS if is_forcing else _WAITING_LOOKAHEAD


async def build(
    params: inference_pb2.SamplingParams,
    model: Model,
    limits: ModelLimits,
    grammar: logits_pb2.Grammar | None = None,
) -> logits_pb2.LogitsParams:
    """The message of checked parameters, and of the grammar that the output follows. RequestError
    if the message is too large.
    """
    message = logits_pb2.LogitsParams(
        # -0.0 is no default in a message.
        presence_penalty=params.presence_penalty or 0.0,
        frequency_penalty=params.frequency_penalty or 0.0,
        min_tokens=params.min_tokens,
        allowed_token_ids=params.allowed_token_ids.ids,
        processed_logprobs=(
            params.HasField("logprobs")
            and params.logprobs_mode == inference_pb2.LOGPROBS_MODE_PROCESSED
        ),
        processor_args=params.processor_args if params.processor_args.fields else None,
        grammar=grammar,
    )
    if params.repetition_penalty != 1:
        message.repetition_penalty = params.repetition_penalty
    if params.typical_p != 1:
        message.typical_p = params.typical_p
    if params.min_tokens or message.HasField("grammar"):
        # End-of-sequence tokens too if they are ignored, as in vLLM.
        stop_token_ids = {*limits.eos_token_ids, *params.stop_token_ids}
        message.stop_token_ids.extend(sorted(stop_token_ids))
        if params.min_tokens and message.allowed_token_ids:
            _check_possible(params.allowed_token_ids.ids, stop_token_ids)
    if message.HasField("grammar") and not message.stop_token_ids:
        raise invalid(
            message.grammar.field,
            "NO_STOP_TOKEN",
            "needs a stop token; the model has no end-of-sequence token",
        )
    for token_id, bias in sorted(params.logit_bias.items()):
        if bias:
            message.bias_token_ids.append(token_id)
            message.biases.append(bias)
    for token_ids in await _bad_words(params.bad_words, model, limits.vocab_size):
        message.bad_words_token_ids.extend(token_ids)
        message.bad_words_lengths.append(len(token_ids))
    _check_size(message)
    return message


def _check_possible(allowed_token_ids: Sequence[int], stop_token_ids: set[int]) -> None:
    """RequestError if no token is possible before `min_tokens`."""
    if stop_token_ids.issuperset(allowed_token_ids):
        raise invalid(
            _ALLOWED, "ONLY_STOP_TOKENS", "are all stop tokens, which min_tokens makes impossible"
        )


async def _bad_words(
    words: Sequence[str], model: Model, vocab_size: int
) -> Sequence[Sequence[int]]:
    """The token sequences of words, as vLLM has them: each word without its leading spaces, and
    with one where that gives as many tokens and another first one."""
    if not words:
        return ()
    stripped = [word.lstrip() for word in words]
    encoded = await model.encode_each([*stripped, *(f" {word}" for word in stripped)])
    sequences: list[Sequence[int]] = []
    pairs = zip(encoded[: len(words)], encoded[len(words) :], strict=True)
    for at, (bare, spaced) in enumerate(pairs):
        field = f"sampling_params.bad_words[{at}]"
        if not bare:
            raise invalid(field, "BAD_WORD_WITHOUT_TOKENS", "has no tokens")
        found = [bare]
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
        for token_ids in found:
            if max(token_ids) >= vocab_size:
                raise outside_vocabulary(field, max(token_ids), vocab_size)
        sequences += found
    return sequences


def _check_size(message: logits_pb2.LogitsParams) -> None:
    """RequestError at the largest field if the message is too large."""
    if message.ByteSize() <= MAX_BYTES:
        return
    # The other fields cannot be this large.
    parts = {
        _ALLOWED: logits_pb2.LogitsParams(allowed_token_ids=message.allowed_token_ids),
        "sampling_params.bad_words": logits_pb2.LogitsParams(
            bad_words_token_ids=message.bad_words_token_ids,
            bad_words_lengths=message.bad_words_lengths,
        ),
        message.grammar.field: logits_pb2.LogitsParams(grammar=message.grammar),
    }
    sizes = {name: part.ByteSize() for name, part in parts.items()}
    largest = max(sizes, key=lambda name: sizes[name])
    raise invalid(
        largest,
        "LOGITS_PARAMS_SIZE",
        f"takes {sizes[largest]} bytes; all fields that change logits may take {MAX_BYTES}",
    )
