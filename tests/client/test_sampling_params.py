import json

import pytest
from google.protobuf import json_format

from quire import SamplingParams, StructuredOutput
from quire.v1 import inference_pb2


def nested(num_levels):
    """Objects inside one another."""
    value = {}
    for _ in range(num_levels - 1):
        value = {"a": value}
    return value


def test_none_stays_absent_and_zero_is_sent():
    message = SamplingParams(temperature=0.0, top_k=0, logprobs=0).to_proto()
    present = {field.name for field, _ in message.ListFields()}
    assert present == {"temperature", "top_k", "logprobs"}


def test_every_field_arrives():
    message = SamplingParams(
        temperature=0.5,
        top_k=40,
        top_p=0.25,
        min_p=0.125,
        seed=2**64 - 1,
        max_tokens=7,
        stop=["a", "b"],
        stop_token_ids=[3, 4],
        ignore_eos=True,
        skip_special_tokens=False,
        n=3,
        logprobs=20,
        prompt_logprobs=0,
    ).to_proto()
    assert message.temperature == 0.5
    assert message.top_k == 40
    assert (message.top_p, message.min_p) == (0.25, 0.125)
    assert message.seed == 2**64 - 1
    assert (message.max_tokens, message.n, message.logprobs) == (7, 3, 20)
    assert message.HasField("prompt_logprobs")
    assert list(message.stop) == ["a", "b"]
    assert list(message.stop_token_ids) == [3, 4]
    assert message.ignore_eos
    assert message.HasField("skip_special_tokens")
    assert not message.skip_special_tokens


def test_every_field_of_the_proto_has_an_argument_of_its_name():
    values = {
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.25,
        "min_p": 0.125,
        "seed": 5,
        "max_tokens": 7,
        "stop": ["a"],
        "stop_token_ids": [3],
        "ignore_eos": False,
        "skip_special_tokens": False,
        "include_stop_str_in_output": False,
        "n": 3,
        "logprobs": 0,
        "prompt_logprobs": 0,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "logit_bias": {7: -100.0, 9: 2.5},
        "allowed_token_ids": [4, 5],
        "bad_words": ["x", "y"],
        "typical_p": 0.75,
        "truncate_prompt_tokens": 9,
        "detokenize": False,
        "logprobs_mode": "processed",
        "structured_output": StructuredOutput(regex="a+"),
        "processor_args": {"mine": {"strength": 2.0}},
        "speculation": False,
    }
    assert set(values) == set(inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    message = SamplingParams(**values).to_proto()
    assert {field.name for field, _ in message.ListFields()} == set(values)
    assert dict(message.logit_bias) == {7: -100.0, 9: 2.5}
    assert list(message.allowed_token_ids.ids) == [4, 5]
    assert message.logprobs_mode == inference_pb2.LOGPROBS_MODE_PROCESSED
    assert json_format.MessageToDict(message.processor_args) == values["processor_args"]
    assert message.structured_output.regex == "a+"
    penalties = (message.presence_penalty, message.frequency_penalty, message.repetition_penalty)
    assert penalties == (0.5, -0.5, 1.5)


def test_minus_one_keeps_as_many_tokens_of_a_prompt_as_the_context_takes():
    message = SamplingParams(truncate_prompt_tokens=-1).to_proto()
    assert message.truncate_prompt_tokens == 2**32 - 1


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("values", "field", "value"),
    [
        ({"json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"json": '{"type": "null"}'}, "json_schema", '{"type": "null"}'),
        ({"json": True}, "json_schema", "true"),
        ({"json": False}, "json_schema", "false"),
        ({"regex": "[ab]+"}, "regex", "[ab]+"),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"structural_tag": {"type": "x"}}, "structural_tag", '{"type": "x"}'),
    ],
    ids=str,
)
def test_a_structured_output_is_one_of_its_formats(values, field, value):
    message = StructuredOutput(**values).to_proto()
    assert message.WhichOneof("format") == field
    assert getattr(message, field) == value


def test_choices_and_any_object_are_formats():
    assert list(StructuredOutput(choice=["a", "b"]).to_proto().choice.texts) == ["a", "b"]
    message = StructuredOutput(json_object=True).to_proto()
    assert message.WhichOneof("format") == "json_object"


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({}, ValueError, r"exactly one field must be set \(got none\)"),
        ({"json_object": False}, ValueError, r"got none"),
        ({"regex": "a", "choice": ["a"]}, ValueError, r"got regex, choice"),
        ({"json": 5}, TypeError, r"json: must be JSON as a text or an object \(got 5\)"),
        ({"json": {"a": {1, 2}}}, TypeError, r"json: not representable as JSON"),
        ({"json": {"a": float("nan")}}, ValueError, r"json: not representable as JSON"),
        ({"json": {"a": "\ud800"}}, ValueError, r"json: has a text that is no valid UTF-8"),
        ({"json": True, "regex": "a"}, ValueError, r"got json, regex"),
        ({"json": {5: 1}}, TypeError, r"json: must be an object with texts as keys"),
        ({"choice": "abc"}, TypeError, r"choice: must be a list of texts \(got 'abc'\)"),
        ({"choice": ["a", 1]}, TypeError, r"choice\[1\]: must be a text \(got 1\)"),
        ({"json_object": 1}, TypeError, r"json_object: must be True or False"),
    ],
    ids=str,
)
def test_a_wrong_format_is_named(values, error, message):
    with pytest.raises(error, match=message):
        StructuredOutput(**values)


def test_a_single_stop_string_may_be_a_text():
    assert list(SamplingParams(stop="END").to_proto().stop) == ["END"]


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("top_k", -1, "-1"),
        ("max_tokens", 2**32, "4294967296"),
        ("n", -1, "-1"),
        ("logprobs", -1, "-1"),
        ("stop_token_ids", [5, -7], "-7"),
        ("truncate_prompt_tokens", -2, "-2"),
        ("allowed_token_ids", [-1], "-1"),
        ("logit_bias", {-1: 2}, "-1"),
        ("min_tokens", 2**32, "4294967296"),
    ],
)
def test_a_value_out_of_range_is_named(name, value, shown):
    with pytest.raises(ValueError, match=rf"{name}.*: must .* \(got {shown}\)"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", 10**400, "temperature: must be a number of 64 bits"),
        ("logit_bias", {1: 10**400}, r"logit_bias\[1\]: must be a number of 64 bits"),
        ("processor_args", {"a": 10**400}, "processor_args: has a number of more than 64 bits"),
        ("processor_args", nested(33), "processor_args: is nested in more than 32 levels"),
        ("processor_args", nested(100_000), "processor_args: is nested"),
    ],
)
def test_a_value_that_no_message_can_contain_is_named(name, value, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{name: value})


def test_arguments_of_processors_are_sent_as_json_has_them():
    given = {"a": {1: (2, None)}, "deep": nested(31)}
    sent = inference_pb2.SamplingParams.FromString(
        SamplingParams(processor_args=given).to_proto().SerializeToString()
    )
    expected = {"a": {"1": [2, None]}, "deep": nested(31)}
    assert json_format.MessageToDict(sent.processor_args) == expected


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", "hot", r"temperature: must be a number \(got 'hot'\)"),
        ("top_p", True, r"top_p: must be a number \(got True\)"),
        ("min_p", "0.1", r"min_p: must be a number \(got '0\.1'\)"),
        ("top_k", 2.5, r"top_k: must be an integer \(got 2\.5\)"),
        ("max_tokens", "3", r"max_tokens: must be an integer \(got '3'\)"),
        ("n", 2.0, r"n: must be an integer \(got 2\.0\)"),
        ("logprobs", True, r"logprobs: must be an integer \(got True\)"),
        ("seed", 1.0, r"seed: must be an integer \(got 1\.0\)"),
        ("stop", 5, r"stop: must be a text or a list of texts \(got 5\)"),
        ("stop", ["a", b"b"], r"stop: must be a text \(got b'b'\)"),
        ("stop_token_ids", 5, r"stop_token_ids: must be a list of token ids \(got 5\)"),
        ("stop_token_ids", ["a"], r"stop_token_ids\[0\]: must be an integer \(got 'a'\)"),
        ("presence_penalty", "1", r"presence_penalty: must be a number \(got '1'\)"),
        ("logit_bias", [5], r"logit_bias: must be an object of numbers by token id \(got \[5\]\)"),
        ("logit_bias", {"5": 1}, r"logit_bias\['5'\]: must be an integer \(got '5'\)"),
        ("logit_bias", {5: "1"}, r"logit_bias\[5\]: must be a number \(got '1'\)"),
        ("logit_bias", {5: None}, r"logit_bias\[5\]: must be a number by a token id"),
        ("bad_words", "word", r"bad_words: must be a list of texts \(got 'word'\)"),
        ("bad_words", [None], r"bad_words\[0\]: must be a text \(got None\)"),
        ("logprobs_mode", "other", "logprobs_mode: must be 'raw' or 'processed'"),
        ("logprobs_mode", ["raw"], "logprobs_mode: must be 'raw' or 'processed'"),
        ("structured_output", {"regex": "a"}, "structured_output: must be a StructuredOutput"),
        ("processor_args", [1], "processor_args: must be an object with texts as keys"),
        ("processor_args", {"a": b""}, "processor_args: not representable as JSON"),
        ("ignore_eos", 1, r"ignore_eos: must be True or False \(got 1\)"),
        ("speculation", "off", r"speculation: must be True or False \(got 'off'\)"),
        ("skip_special_tokens", "yes", "skip_special_tokens: must be True or False"),
    ],
)
def test_a_wrong_type_is_named_with_its_value(name, value, message):
    with pytest.raises(TypeError, match=message):
        SamplingParams(**{name: value})


def test_frozen():
    with pytest.raises(AttributeError):
        SamplingParams().seed = 1
