"""Settings: read once from flags and `QUIRE_*` environment variables, checked, frozen."""

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn, Self

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict, SettingsError

from quire.service.addresses import Address
from quire.service.tls import TLS, ServerCertificates, ServerTLS

# Variables that Kubernetes adds to containers for a service that is called quire-<name>.
SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT\w*|PORT(_\d+_(TCP|UDP)\w*)?)$")

# In the name of a variable whose value is not for logs.
_SECRET = re.compile(r"PASSWORD|SECRET|TOKEN|KEY", re.IGNORECASE)
# What precedes a password in a URL, and what follows it.
_PASSWORD = re.compile(r"(//[^/@:]*:).*(@)")


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
    tls_cert: Path | None = Field(
        None,
        description="PEM file with the certificate for TLS, followed by intermediate ones; no TLS "
        "if absent. Read again when it changes.",
    )
    tls_key: Path | None = Field(None, description="PEM file with the key of --tls-cert.")
    tls_client_ca: Path | None = Field(
        None,
        description="PEM file with the authorities whose clients may connect (mutual TLS); clients "
        "need no certificate if absent.",
    )
    health_listen: Address | None = Field(
        None,
        description="A second address, host:port or unix:/path, that serves only grpc.health.v1 "
        "and has no TLS, for probes without certificates; off if absent.",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _is_a_value(cls, value: object, info: ValidationInfo) -> object:
        """Refuse an empty path, which would be the working directory, and an empty name. A variable
        is empty where a file of variables has no value for it."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if value == "" and kind in (Path | None, str | None):
            raise ValueError("must not be empty; leave it out for the default")
        return value

    @field_validator("address_file", "http_address_file", "record", check_fields=False)
    @classmethod
    def _can_be_created(cls, value: Path | None) -> Path | None:
        if value is not None and not value.parent.is_dir():
            raise ValueError(f"there is no folder {value.parent}; create it first")
        return value

    @model_validator(mode="after")
    def _has_usable_tls(self) -> Self:
        tls = self.server_tls
        if tls is None and (self.tls_key or self.tls_client_ca):
            raise ValueError("--tls-key and --tls-client-ca need --tls-cert")
        if tls is not None:
            ServerCertificates(tls)
        return self

    def server_certificates(self, protocol: str = "http/1.1") -> ServerCertificates | None:
        """The certificates of the service's own servers, and what those of the standard library
        speak; None without TLS. TLSError if they have become unusable."""
        return None if self.server_tls is None else ServerCertificates(self.server_tls, protocol)

    @property
    def server_tls(self) -> ServerTLS | None:
        """The files of the service's own identity; None without TLS."""
        if self.tls_cert is None:
            return None
        if self.tls_key is None:
            raise ValueError("--tls-cert needs --tls-key")
        return ServerTLS(self.tls_cert, self.tls_key, self.tls_client_ca)

    @classmethod
    def load(cls, argv: list[str] | None = None) -> Self:
        """Read the settings; an invalid one ends the process with status 2 and its value on
        stderr."""
        try:
            cls._refuse_unknown_variables()
            return CliApp.run(cls, cli_args=sys.argv[1:] if argv is None else argv)
        except ValidationError as error:
            lines = [cls._line(e) for e in error.errors()]
            stop(str(cls.model_config["cli_prog_name"]), lines)
        except SettingsError as error:
            stop(str(cls.model_config["cli_prog_name"]), [str(error)])

    @classmethod
    def _refuse_unknown_variables(cls) -> None:
        prefix = cls.model_config["env_prefix"]
        known = {(prefix + name).upper() for name in cls.model_fields}
        for name in os.environ:
            if name.startswith(prefix) and name not in known and not SERVICE_LINK.search(name):
                got = "" if _SECRET.search(name) else f" (got {os.environ[name]!r})"
                raise SettingsError(f"{name}: no such setting{got}")

    @classmethod
    def _line(cls, error: ErrorDetails) -> str:
        """The setting, as a flag and a variable, and what is wrong. An error of several settings
        together names them itself."""
        message = error["msg"].removeprefix("Value error, ")
        if not error["loc"]:
            return message
        name = str(error["loc"][0])
        # The input of a missing setting is the dictionary of all the others.
        value = _PASSWORD.sub(r"\1***\2", repr(error["input"]))
        got = "" if error["type"] == "missing" else f" (got {value})"
        flag = name.replace("_", "-")
        return f"--{flag} / {cls.model_config['env_prefix']}{name.upper()}: {message}{got}"


def link_tls(peer: str, ca: Path | None, cert: Path | None, key: Path | None) -> TLS | None:
    """The TLS of connections to a peer, from its settings; None without. ValueError if they cannot
    be used."""
    if ca is not None:
        return TLS(ca, cert, key)
    if cert is not None or key is not None:
        raise ValueError(f"--{peer}-tls-cert and --{peer}-tls-key need --{peer}-tls-ca")
    return None


def stop(program: str, lines: list[str]) -> NoReturn:
    """End the process with status 2, because settings are wrong."""
    for line in lines:
        print(f"{program}: {line}", file=sys.stderr)
    raise SystemExit(2)
