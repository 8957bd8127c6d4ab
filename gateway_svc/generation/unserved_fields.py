"""Fields of the public protos that nothing serves yet. They are refused, never ignored.

Who serves a field removes it from here.
"""

from google.protobuf.message import Message

from quire.service.errors import invalid

SAMPLING_PARAMS = frozenset(
    {
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "min_tokens",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "logprobs_mode",
        "processor_args",
        "typical_p",
    }
)
# Values that change nothing.
_NEUTRAL = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "typical_p": 1,
}


def refuse(field: str, message: Message, unserved: frozenset[str]) -> None:
    """RequestError at the first field of the message at `field` that is set and not served."""
    for descriptor, value in message.ListFields():
        name = descriptor.name
        if name in unserved and value != _NEUTRAL.get(name):
            raise invalid(f"{field}.{name}", "UNSUPPORTED_FIELD", "is not served yet")
