"""Settings: read once from flags and `QUIRE_*` environment variables, checked, frozen."""

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn, Self

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict, SettingsError

# Variables that Kubernetes adds to containers for a service that is called quire-<name>.
_SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT\w*|PORT(_\d+_(TCP|UDP)\w*)?)$")


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


_LogLevel = Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)]


class ServiceSettings(BaseSettings):
    """The settings of one service. A subclass sets `env_prefix` and `cli_prog_name` in its
    `model_config`. Flags override environment variables, which override defaults."""

    model_config = SettingsConfigDict(
        frozen=True, cli_kebab_case=True, cli_hide_none_type=True, cli_implicit_flags=True
    )

    log_level: _LogLevel = Field("info", description="Least severe level that is logged.")
    log_format: Literal["auto", "human", "json"] = Field(
        "auto", description="auto: human on a terminal, JSON otherwise."
    )
    address_file: Path | None = Field(
        None, description="File that receives the bound address once the service listens."
    )
    drain_grace_s: float = Field(
        10.0, ge=0, description="Seconds that running work gets after the first stop signal."
    )

    @classmethod
    def load(cls, argv: list[str] | None = None) -> Self:
        """Read the settings; an invalid one ends the process with status 2 and its value on
        stderr."""
        try:
            cls._refuse_unknown_variables()
            return CliApp.run(cls, cli_args=sys.argv[1:] if argv is None else argv)
        except ValidationError as error:
            lines = [f"{cls._names(e['loc'])}: {_message(e)}" for e in error.errors()]
            _stop(str(cls.model_config["cli_prog_name"]), lines)
        except SettingsError as error:
            _stop(str(cls.model_config["cli_prog_name"]), [str(error)])

    @classmethod
    def _refuse_unknown_variables(cls) -> None:
        prefix = cls.model_config["env_prefix"]
        known = {(prefix + name).upper() for name in cls.model_fields}
        for name in os.environ:
            if name.startswith(prefix) and name not in known and not _SERVICE_LINK.search(name):
                raise SettingsError(f"{name}: no such setting (got {os.environ[name]!r})")

    @classmethod
    def _names(cls, loc: tuple[int | str, ...]) -> str:
        name = str(loc[0]) if loc else "settings"
        return f"--{name.replace('_', '-')} / {cls.model_config['env_prefix']}{name.upper()}"


def _message(error: ErrorDetails) -> str:
    message = error["msg"].removeprefix("Value error, ")
    # The input of a missing setting is the dictionary of all the others.
    return message if error["type"] == "missing" else f"{message} (got {error['input']!r})"


def _stop(program: str, lines: list[str]) -> NoReturn:
    for line in lines:
        print(f"{program}: {line}", file=sys.stderr)
    raise SystemExit(2)
