import pytest

from quire import SamplingParams


def test_none_stays_absent_and_zero_is_sent():
    message = SamplingParams(temperature=0.0, top_k=0).to_proto()
    present = {field.name for field, _ in message.ListFields()}
    assert present == {"temperature", "top_k"}


def test_every_field_arrives():
    message = SamplingParams(
        temperature=0.5,
        top_k=40,
        top_p=0.25,
        seed=2**64 - 1,
        max_tokens=7,
        stop=["a", "b"],
        stop_token_ids=[3, 4],
        ignore_eos=True,
        skip_special_tokens=False,
    ).to_proto()
    assert message.temperature == 0.5
    assert message.top_k == 40
    assert message.top_p == 0.25
    assert message.seed == 2**64 - 1
    assert message.max_tokens == 7
    assert list(message.stop) == ["a", "b"]
    assert list(message.stop_token_ids) == [3, 4]
    assert message.ignore_eos
    assert message.HasField("skip_special_tokens")
    assert not message.skip_special_tokens


def test_one_stop_string_is_one():
    assert list(SamplingParams(stop="END").to_proto().stop) == ["END"]


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [("top_k", -1, "-1"), ("max_tokens", 2**32, "4294967296"), ("stop_token_ids", [5, -7], "-7")],
)
def test_what_no_message_can_carry_is_named_with_its_value(name, value, shown):
    with pytest.raises(ValueError, match=rf"{name}: .* \(got {shown}\)"):
        SamplingParams(**{name: value})


def test_frozen():
    with pytest.raises(AttributeError):
        SamplingParams().seed = 1
