"""The parameters that change logits, from the client's to the worker's."""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import gateway_tokenizers
import pytest
from google.protobuf import struct_pb2
from google.rpc import error_details_pb2

from gateway_svc.generation import logits_params
from gateway_svc.text.model_files import ModelFiles
from gateway_svc.text.served_model import Model, ModelLimits
from quire.internal.v1 import logits_pb2
from quire.service.errors import RequestError
from quire.v1 import inference_pb2 as pb
from quire.v1.structured_output_pb2 import StructuredOutput

LIMITS = ModelLimits(
    vocab_size=400, max_model_len=64, longest_token=8, eos_token_ids=(1,), has_chat_template=False
)
TOKENIZERS = {
    "byte level": gateway_tokenizers.byte_level(),
    "byte fallback": gateway_tokenizers.byte_fallback(),
}


@pytest.fixture(params=TOKENIZERS)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    files = ModelFiles(TOKENIZERS[request.param], 400, 64, (1,), None)
    with ThreadPoolExecutor(1) as threads:
        yield Model.from_files("tiny", files, threads)


def struct(**values: object) -> struct_pb2.Struct:
    message = struct_pb2.Struct()
    message.update(values)
    return message


def ids(*token_ids: int) -> pb.TokenIds:
    return pb.TokenIds(ids=token_ids)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"presence_penalty": 0, "frequency_penalty": -0.0, "repetition_penalty": 1},
        {"min_tokens": 0, "typical_p": 1, "stop_token_ids": [3]},
        {"logit_bias": {}, "bad_words": [], "processor_args": struct()},
        {"logit_bias": {3: 0, 4: -0.0}},
        {"logprobs": 3, "logprobs_mode": pb.LOGPROBS_MODE_RAW},
        {"logprobs_mode": pb.LOGPROBS_MODE_PROCESSED},
        {"temperature": 0.5, "top_k": 4, "min_p": 0.1, "seed": 9},
    ],
    ids=str,
)
async def test_values_that_change_nothing_are_left_out(model: Model, params: dict) -> None:
    checked = pb.SamplingParams(**params)
    logits_params.check(checked, LIMITS.vocab_size)
    assert (await logits_params.build(checked, model, LIMITS)).SerializeToString() == b""


def test_the_ends_of_ranges_are_served() -> None:
    for penalty in (1e-30, 1e30):
        logits_params.check(pb.SamplingParams(repetition_penalty=penalty), LIMITS.vocab_size)


async def test_every_value_reaches_the_worker(model: Model) -> None:
    params = pb.SamplingParams(
        presence_penalty=-2,
        frequency_penalty=0.5,
        repetition_penalty=1.25,
        min_tokens=5,
        stop_token_ids=[9, 3],
        logit_bias={7: -100, 2: 0.5, 5: 0},
        allowed_token_ids=ids(9, 2, 7),
        logprobs=0,
        logprobs_mode=pb.LOGPROBS_MODE_PROCESSED,
        typical_p=0.75,
        processor_args=struct(mine={"strength": 2}),
        ignore_eos=True,
    )
    logits_params.check(params, LIMITS.vocab_size)
    assert await logits_params.build(params, model, LIMITS) == logits_pb2.LogitsParams(
        presence_penalty=-2,
        frequency_penalty=0.5,
        repetition_penalty=1.25,
        min_tokens=5,
        stop_token_ids=[1, 3, 9],
        bias_token_ids=[2, 7],
        biases=[0.5, -100],
        allowed_token_ids=[9, 2, 7],
        processed_logprobs=True,
        typical_p=0.75,
        processor_args=struct(mine={"strength": 2}),
    )


def vllm_s_sequences(model: Model, words: Sequence[str]) -> list[list[int]]:
    """`SamplingParams.update_from_tokenizer` in words: each word bare, and with a space before it
    where that gives a sequence of the same length with another first token."""
    found: list[list[int]] = []
    for word in words:
        for prefix in ("", " "):
            text = prefix + word.lstrip()
            token_ids = list(model.files.tokenizer.encode(text, add_special_tokens=False).ids)
            is_other = not prefix or token_ids[0] != found[-1][0]
            if is_other and (not prefix or len(token_ids) == len(found[-1])):
                found.append(token_ids)
    return found


async def test_bad_words_are_sequences_of_tokens_with_and_without_a_space(model: Model) -> None:
    words = ["fox", " fox", "fox and dog", "日本", "a", "ab", "cab", "é!", "naïve", " \n x", "<s>"]
    params = pb.SamplingParams(bad_words=words)
    logits_params.check(params, LIMITS.vocab_size)
    message = await logits_params.build(params, model, LIMITS)
    flat = list(message.bad_words_token_ids)
    sequences = []
    for length in message.bad_words_lengths:
        sequences.append(flat[:length])
        flat = flat[length:]
    assert not flat
    assert sequences == vllm_s_sequences(model, words)
    if model.files.tokenizer is TOKENIZERS["byte level"]:
        # The others write a space before every text.
        assert len(words) < len(sequences)


INVALID = {
    "presence below": ({"presence_penalty": -2.1}, "presence_penalty", "is -2.1"),
    "presence above": ({"presence_penalty": 2.1}, "presence_penalty", "must be -2 to 2"),
    "presence nan": ({"presence_penalty": math.nan}, "presence_penalty", "is nan"),
    "frequency inf": ({"frequency_penalty": math.inf}, "frequency_penalty", "must be -2 to 2"),
    "repetition 0": ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    "repetition negative": ({"repetition_penalty": -1}, "repetition_penalty", "above 0"),
    "repetition nan": ({"repetition_penalty": math.nan}, "repetition_penalty", "is nan"),
    "repetition tiny": ({"repetition_penalty": 1e-45}, "repetition_penalty", "1e-30 to 1e30"),
    "repetition huge": ({"repetition_penalty": 3e38}, "repetition_penalty", "1e-30 to 1e30"),
    "repetition inf": ({"repetition_penalty": math.inf}, "repetition_penalty", "finite"),
    "typical_p 0": ({"typical_p": 0}, "typical_p", "above 0 and at most 1"),
    "typical_p above 1": ({"typical_p": 1.0000001}, "typical_p", "is 1.0000001"),
    "typical_p nan": ({"typical_p": math.nan}, "typical_p", "is nan"),
    "min above max": ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "max_tokens = 4"),
    "unknown mode": ({"logprobs_mode": 99}, "logprobs_mode", "is 99"),
    "many biases": ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias", "at most 1024"),
    "bias outside": ({"logit_bias": {400: 1}}, "logit_bias[400]", "0 to 399"),
    "bias too low": ({"logit_bias": {3: -100.5}}, "logit_bias[3]", "-100 to 100"),
    "bias nan": ({"logit_bias": {3: math.nan}}, "logit_bias[3]", "is nan"),
    "nothing allowed": ({"allowed_token_ids": ids()}, "allowed_token_ids.ids", "at least 1"),
    "allowed outside": (
        {"allowed_token_ids": ids(1, 400)},
        "allowed_token_ids.ids[1]",
        "is 400",
    ),
    "many bad words": ({"bad_words": ["a"] * 129}, "bad_words", "at most 128"),
    "empty bad word": ({"bad_words": ["a", ""]}, "bad_words[1]", "has 0 characters"),
    "long bad word": ({"bad_words": ["a" * 257]}, "bad_words[0]", "1 to 256"),
    "bad word of spaces": ({"bad_words": ["\n\t "]}, "bad_words[0]", "only white space"),
    "large arguments": ({"processor_args": struct(a="x" * 2**14)}, "processor_args", "bytes"),
    "infinite argument": ({"processor_args": struct(a=[math.inf])}, "processor_args", "not finite"),
}


@pytest.mark.parametrize("name", INVALID)
def test_the_invalid_field_is_named(name: str) -> None:
    values, field, part = INVALID[name]
    with pytest.raises(RequestError) as caught:
        logits_params.check(pb.SamplingParams(**values), LIMITS.vocab_size)
    assert named_field(caught.value) == f"sampling_params.{field}"
    assert part in caught.value.message


@pytest.mark.parametrize("name", TOKENIZERS)
async def test_a_token_outside_of_the_vocabulary_names_the_bad_word(name: str) -> None:
    files = ModelFiles(TOKENIZERS[name], 2, 64, (1,), None)
    params, limits = pb.SamplingParams(bad_words=["ab"]), replace(LIMITS, vocab_size=2)
    with ThreadPoolExecutor(1) as threads:
        model = Model.from_files("tiny", files, threads)
        with pytest.raises(RequestError) as caught:
            await logits_params.build(params, model, limits)
    assert named_field(caught.value) == "sampling_params.bad_words[0]"


async def test_the_largest_field_of_too_large_a_message_is_named(model: Model) -> None:
    limits = replace(LIMITS, vocab_size=2**17)
    params = pb.SamplingParams(
        allowed_token_ids=ids(*range(2**16, 2**17)), bad_words=["a"], logit_bias={3: 1}
    )
    await logits_params.build(params, model, limits)
    params.allowed_token_ids.ids.extend(range(2**15))
    with pytest.raises(RequestError) as caught:
        await logits_params.build(params, model, limits)
    assert named_field(caught.value) == "sampling_params.allowed_token_ids.ids"
    assert "262144" in caught.value.message


async def test_only_stop_tokens_before_min_tokens_are_refused(model: Model) -> None:
    params = pb.SamplingParams(
        min_tokens=2, stop_token_ids=[9], allowed_token_ids=ids(9, 1), max_tokens=5
    )
    with pytest.raises(RequestError) as caught:
        await logits_params.build(params, model, LIMITS)
    assert named_field(caught.value) == "sampling_params.allowed_token_ids.ids"
    params.allowed_token_ids.ids.append(3)
    await logits_params.build(params, model, LIMITS)
    params.ClearField("min_tokens")
    del params.allowed_token_ids.ids[2:]
    await logits_params.build(params, model, LIMITS)


@pytest.mark.parametrize(
    ("sizes", "field"),
    [
        ((2**18, 1), "conversation.tools"),
        ((2**17 + 2**14, 24_000), "conversation.tools"),
        ((2**16, 2**16), "sampling_params.allowed_token_ids.ids"),
    ],
)
async def test_too_large_parameters_name_the_largest(
    model: Model, sizes: tuple[int, int], field: str
) -> None:
    """A format that forced calls replace is no part of them."""
    num_characters, num_ids = sizes
    params = pb.SamplingParams(
        structured_output=StructuredOutput(regex="a"),
        allowed_token_ids=pb.TokenIds(ids=[2**28] * num_ids),
    )
    grammar = logits_pb2.Grammar(definition="x" * num_characters, field="conversation.tools")
    with pytest.raises(RequestError) as caught:
        await logits_params.build(params, model, LIMITS, grammar)
    assert named_field(caught.value) == field


def named_field(error: RequestError) -> str:
    for detail in error.packed_details():
        request = error_details_pb2.BadRequest()
        if detail.Unpack(request):
            return str(request.field_violations[0].field)
    raise AssertionError("names no field")


@pytest.mark.parametrize(
    ("params", "count"),
    [
        ({}, 0),
        ({"min_tokens": 3, "bias_token_ids": [1], "biases": [2], "presence_penalty": 1}, 0),
        ({"grammar": logits_pb2.Grammar(definition="g")}, 16),
        ({"grammar": logits_pb2.Grammar(definition="g"), "presence_penalty": 1}, 16),
        # These may exclude what the grammar forces; look-ahead lets them wait for it.
        ({"grammar": logits_pb2.Grammar(definition="g"), "allowed_token_ids": [1]}, 1),
        ({"grammar": logits_pb2.Grammar(), "bad_words_token_ids": [1]}, 1),
        ({"grammar": logits_pb2.Grammar(), "processor_args": struct(mine=1)}, 1),
    ],
    ids=str,
)
def test_only_grammars_give_look_ahead(params: dict, count: int) -> None:
    message = logits_pb2.LogitsParams(**params)
    assert logits_params.num_lookahead_tokens(message) == count
