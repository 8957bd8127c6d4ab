"""Fields of a `quantization_config`, which checkpoints write in JSON of any kind. A field that is
null counts as absent. All functions raise ModelError for a value of another kind."""

from collections.abc import Mapping
from typing import Any

from worker_svc.model.checkpoint import ModelError


def object_of(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Empty if it is absent."""
    value = fields.get(name)
    return {} if value is None else as_object(name, value)


def as_object(name: str, value: object) -> Mapping[str, Any]:
    """The value, which has this name."""
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "an object")
    return value


def integer_of(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is None or type(value) is int:
        return value
    raise _wrong(name, value, "an integer")


def text_of(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value
    raise _wrong(name, value, "a string")


def texts_of(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Empty if it is absent."""
    value = fields.get(name)
    if value is None:
        return ()
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return tuple(value)
    raise _wrong(name, value, "a list of strings")


def _wrong(name: str, value: object, expected: str) -> ModelError:
    return ModelError(
        f"the quantisation in the model's config: {name} is {value!r}, not {expected}; correct it"
    )
