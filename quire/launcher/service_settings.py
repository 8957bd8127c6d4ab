"""The settings of all services, as the launcher can pass them on.

They are read from the services' own settings classes, so that none is missing. The classes are
imported by name, as the services are started by name: `quire` works without the services' packages.
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

SERVICES: Final = ("gateway", "scheduler", "worker")
_CLASSES: Final = {
    "gateway": "GatewaySettings",
    "scheduler": "SchedulerSettings",
    "worker": "WorkerSettings",
}
_SOCKET = "the services of a stack have private sockets"
# Settings that a stack has its own values for, and what to use instead.
_RESERVED: Final = {
    ("gateway", "listen"): "use --listen, or --host and --port",
    ("gateway", "http_listen"): "use --http-listen, or --host and --http-port",
    ("gateway", "model"): "use the argument MODEL",
    ("gateway", "revision"): "use --revision",
    ("gateway", "served_model_name"): "use --served-model-name",
    ("gateway", "scheduler"): _SOCKET,
    ("gateway", "http_address_file"): _SOCKET,
    ("scheduler", "listen"): _SOCKET,
    ("scheduler", "workers"): "use --workers for their number",
    ("scheduler", "redis_url"): "use --redis-url",
    ("worker", "listen"): _SOCKET,
    ("worker", "model"): "use the argument MODEL",
    ("worker", "revision"): "use --revision",
    ("worker", "progress_file"): "it shows the progress itself",
    **{(service, "address_file"): _SOCKET for service in SERVICES},
    **{(service, "health_listen"): _SOCKET for service in SERVICES},
}
_TYPE_NAMES: Final = {int: "INTEGER", float: "NUMBER", Path: "PATH"}


@dataclass(frozen=True)
class ServiceSetting:
    """A field of a service's settings class."""

    service: str
    # In snake case.
    name: str
    field: FieldInfo

    @property
    def variable(self) -> str:
        """The environment variable of the service."""
        return f"QUIRE_{self.service.upper()}_{self.name.upper()}"

    @property
    def flag(self) -> str:
        return f"--{self.service}.{self.name.replace('_', '-')}"

    @property
    def off_flag(self) -> str:
        """The flag that switches an on-or-off setting off."""
        return f"--{self.service}.no-{self.name.replace('_', '-')}"

    @property
    def reserved(self) -> str | None:
        """Why the setting cannot be passed on; None if it can."""
        return _RESERVED.get((self.service, self.name))

    @property
    def is_flag(self) -> bool:
        """Whether it is on or off."""
        return self._type[0] is bool

    @property
    def form(self) -> str:
        """What a value looks like: choices, or a type in capital letters."""
        kind, metadata = self._type
        if get_origin(kind) is Literal:
            return "|".join(map(str, get_args(kind)))
        if kind is int and any(isinstance(one, BeforeValidator) for one in metadata):
            return "SIZE"
        return _TYPE_NAMES.get(kind, "TEXT")

    @property
    def default(self) -> str | None:
        """The default as text; None if there is none."""
        value = None if self.field.is_required() else self.field.default
        return None if value is None else str(value)

    def check(self, text: str) -> str:
        """Return the text. ValueError if the service would refuse the value."""
        # Not the field itself: it may have what pydantic warns of outside of a class.
        constraints = self.field.metadata
        kind: Any = self.field.annotation
        if constraints:
            kind = Annotated[(kind, *constraints)]
        try:
            TypeAdapter(kind).validate_python(text)
        except ValidationError as error:
            message = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ValueError(f"{message} (got {text!r})") from None
        return text

    @property
    def _type(self) -> tuple[Any, list[Any]]:
        """The annotation without None, and its metadata."""
        kind, metadata = self.field.annotation, list(self.field.metadata)
        if get_origin(kind) in (Union, UnionType):
            [kind] = [one for one in get_args(kind) if one is not NoneType]
        if get_origin(kind) is Annotated:
            kind, *more = get_args(kind)
            metadata += more
        return kind, metadata


def service_settings() -> Iterator[ServiceSetting]:
    """All settings, in the order of their classes. ModuleNotFoundError if a package that a service
    needs is not installed."""
    for service, name in _CLASSES.items():
        settings: Any = getattr(importlib.import_module(f"{service}_svc.settings"), name)
        for field_name, field in settings.model_fields.items():
            yield ServiceSetting(service, field_name, field)
