import pytest

from quire import SamplingParams


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
    ],
)
def test_a_value_out_of_range_is_named(name, value, shown):
    with pytest.raises(ValueError, match=rf"{name}.*: must .* \(got {shown}\)"):
        SamplingParams(**{name: value})


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
        ("ignore_eos", 1, r"ignore_eos: must be True or False \(got 1\)"),
        ("skip_special_tokens", "yes", "skip_special_tokens: must be True or False"),
    ],
)
def test_a_wrong_type_is_named_with_its_value(name, value, message):
    with pytest.raises(TypeError, match=message):
        SamplingParams(**{name: value})


def test_frozen():
    with pytest.raises(AttributeError):
        SamplingParams().seed = 1
