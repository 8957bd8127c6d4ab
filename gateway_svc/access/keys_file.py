"""The keys file: a YAML list of tenants with the hashes of their keys."""

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from gateway_svc.access.tenant import (
    DEFAULT_CLASS,
    TENANT_CLASS,
    PriorityRange,
    Tenant,
    TenantLimits,
)
from quire.service.api_keys import TENANT_NAME
from quire.service.files import check_regular

# Each has its own series of every histogram by class.
MAX_CLASSES = 8
_FIELD = re.compile(r"[a-zA-Z_]{1,32}")
# In a message: a line of the log has to stay readable.
_MAX_REASONS = 20
_INT32_MIN, _INT32_MAX, _UINT32_MAX = -(2**31), 2**31 - 1, 2**32 - 1
_Name = Annotated[str, StringConstraints(pattern=f"^{TENANT_NAME}$")]
_Class = Annotated[str, StringConstraints(pattern=f"^{TENANT_CLASS}$")]
_KeyHash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_Priority = Annotated[int, Field(ge=_INT32_MIN, le=_INT32_MAX)]
_Positive = Annotated[int, Field(ge=1, le=_UINT32_MAX)]
_NotNegative = Annotated[int, Field(ge=0, le=_UINT32_MAX)]


class KeysFileError(Exception):
    """The keys file cannot be used. The message has the reason, and no value of the file: a value
    may be a key that was written where its hash belongs."""


class KeysFileUnreadableError(KeysFileError):
    """The keys file cannot be read now."""


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _PriorityEntry(_Entry):
    min: _Priority
    max: _Priority

    @model_validator(mode="after")
    def _is_ordered(self) -> "_PriorityEntry":
        if self.min > self.max:
            raise ValueError("min must not be above max")
        return self


class _LimitsEntry(_Entry):
    requests_per_minute: _Positive | None = None
    tokens_per_minute: _Positive | None = None
    live_requests: _Positive | None = None
    waiting_tokens: _Positive | None = None
    resumable_requests: _NotNegative | None = None
    output_tokens: _Positive | None = None
    resume_window_s: _NotNegative | None = None


class _TenantEntry(_Entry):
    name: _Name
    # SHA-256 in hexadecimal. Without keys the tenant is refused.
    keys: list[_KeyHash] = []
    weight: float = Field(1.0, ge=0.001, le=1000)
    admin: bool = False
    share_prefixes: bool = False
    priority: _PriorityEntry | None = None
    limits: _LimitsEntry = _LimitsEntry()
    tenant_class: _Class = Field(DEFAULT_CLASS, alias="class")

    def to_tenant(self) -> Tenant:
        return Tenant(
            name=self.name,
            weight=self.weight,
            is_admin=self.admin,
            shares_prefixes=self.share_prefixes,
            priorities=PriorityRange(self.priority.min, self.priority.max)
            if self.priority
            else None,
            limits=TenantLimits(**self.limits.model_dump()),
            tenant_class=self.tenant_class,
        )


class _Loader(yaml.SafeLoader):
    """Refuses a field that is given twice; YAML libraries use the last one silently."""

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Hashable, Any]:
        if not isinstance(node, yaml.MappingNode):
            # By a tag, such as !!set.
            raise yaml.constructor.ConstructorError(None, None, "must have fields", node.start_mark)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        counts = Counter(key.value for key in keys)
        for key in keys:
            if counts[key.value] > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, "a field is given twice", key.start_mark
                )
        return super().construct_mapping(node, deep)

    def skip_event(self) -> None:
        """Go on to the next event; YAMLError if there is none."""
        self.get_event()  # type: ignore[no-untyped-call]

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Convert a value. The library's own conversions of dates, numbers and the like fail with
        whatever error Python has for them."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise yaml.constructor.ConstructorError(
                None, None, "not a valid value", node.start_mark
            ) from error


def read_keys_file(path: Path) -> Mapping[bytes, Tenant]:
    """The tenants of a file by the hashes of their keys. KeysFileError if it is not valid."""
    try:
        check_regular(path)
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise KeysFileUnreadableError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise KeysFileError(f"{path} cannot be read: it is not UTF-8") from None
    try:
        return parse_keys(text)
    except KeysFileError as error:
        raise KeysFileError(f"{path}: {error}") from None


def parse_keys(text: str) -> Mapping[bytes, Tenant]:
    """The tenants of a file's text by the hashes of their keys. KeysFileError if it is invalid."""
    try:
        return _by_hash(_entries(text))
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        # Its message would quote the file.
        raise KeysFileError(f"{line}{_without_quotes(error.problem)}") from None
    except yaml.YAMLError:
        raise KeysFileError("it is not YAML") from None
    except RecursionError:
        raise KeysFileError("it is nested too deeply") from None


def _entries(text: str) -> Iterator[_TenantEntry]:
    """The tenants in the order of the file. KeysFileError, with the first reasons, at the end."""
    errors: list[str] = []
    for i, value in enumerate(_values(text)):
        try:
            yield _TenantEntry.model_validate(value)
        except ValidationError as invalid:
            errors += (
                _describe({**error, "loc": (i, *error["loc"])}) for error in invalid.errors()
            )
    if errors:
        left_out = len(errors) - _MAX_REASONS
        others = [f"and {left_out} more"] if left_out > 0 else []
        raise KeysFileError("; ".join(errors[:_MAX_REASONS] + others))


def _values(text: str) -> Iterator[Any]:
    """The values of the file's list, each when it is needed: while the tree of 10,000 tenants was
    built as a whole, Python's garbage collection held the event loop up for hundreds of
    milliseconds."""
    loader = _Loader(text)
    try:
        loader.skip_event()
        if loader.check_event(yaml.DocumentStartEvent):
            loader.skip_event()
        if not loader.check_event(yaml.SequenceStartEvent):
            raise KeysFileError("file: must be a list of tenants")
        loader.skip_event()
        while not loader.check_event(yaml.SequenceEndEvent):
            yield loader.construct_document(loader.compose_node(None, 0))
        loader.skip_event()
        loader.skip_event()
        if not loader.check_event(yaml.StreamEndEvent):
            raise KeysFileError("file: must be one list, without '---' after it")
    finally:
        loader.dispose()


def _by_hash(entries: Iterable[_TenantEntry]) -> dict[bytes, Tenant]:
    names: set[str] = set()
    classes = {DEFAULT_CLASS}
    tenants: dict[bytes, Tenant] = {}
    for entry in entries:
        classes.add(entry.tenant_class)
        if entry.name in names:
            raise KeysFileError(f"tenant {entry.name!r} is given twice")
        names.add(entry.name)
        tenant = entry.to_tenant()
        for key_hash in map(bytes.fromhex, entry.keys):
            if key_hash in tenants:
                raise KeysFileError(f"a key of tenant {entry.name!r} is given twice")
            tenants[key_hash] = tenant
    if len(classes) > MAX_CLASSES:
        raise KeysFileError(f"there are more than {MAX_CLASSES} classes, {DEFAULT_CLASS} included")
    return tenants


def _describe(error: Any) -> str:
    """The place and the reason of a validation error, without the value."""
    place = "".join(
        f"[{part}]" if isinstance(part, int) else f".{_shown(part)}" for part in error["loc"]
    )
    match error["type"]:
        case "extra_forbidden":
            reason = "no such field"
        case "model_type":
            of = error["loc"][1] if len(error["loc"]) > 1 else "a tenant"
            reason = f"must have the fields of {of}"
        case "string_pattern_mismatch" if "keys" in error["loc"]:
            reason = "must be a SHA-256 hash in 64 lower-case hexadecimal digits"
        case _:
            reason = error["msg"].removeprefix("Value error, ")
    return f"{place}: {reason}"


def _shown(field: str) -> str:
    """The name of a field, unless it may be a key or a hash."""
    return field if _FIELD.fullmatch(field) else "(a name that is not shown)"


def _without_quotes(problem: str | None) -> str:
    """The problem up to the first quotation of the file."""
    return (problem or "it is not YAML").partition("'")[0].strip(" ,") or "it is not YAML"
