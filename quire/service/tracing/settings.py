"""The settings of tracing, of the services that make spans, and how they start the export."""

import os
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Final, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from quire.service.addresses import is_http_url
from quire.service.settings import ServiceSettings
from quire.service.tracing.spans import SpanExporter

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PACKAGES: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc")
_NO_PACKAGES: Final = (
    "needs opentelemetry-sdk and opentelemetry-exporter-otlp-proto-grpc: "
    "pip install 'quire[tracing]'"
)


class TracedServiceSettings(ServiceSettings):
    """The settings of a service that exports spans."""

    otlp_traces_endpoint: str | None = Field(
        None,
        description="Receiver of traces by OTLP over gRPC, http://host:port or https://host:port; "
        "if absent, that of OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT; "
        "without any no traces are exported.",
    )

    @field_validator("otlp_traces_endpoint", mode="before")
    @classmethod
    def _is_absent_if_empty(cls, value: str | None) -> str | None:
        """As OpenTelemetry's own variables are."""
        return value or None

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _is_usable(cls, value: str | None) -> str | None:
        if value is None:
            return None
        check_endpoint(value)
        if not is_installed():
            raise ValueError(_NO_PACKAGES)
        return value

    @model_validator(mode="after")
    def _has_usable_variables(self) -> Self:
        name = endpoint_variable(os.environ)
        if self.otlp_traces_endpoint is None and name is not None and not is_installed():
            raise ValueError(f"{name} {_NO_PACKAGES}")
        return self

    @property
    def exports_traces(self) -> bool:
        return self.otlp_traces_endpoint is not None or endpoint_variable(os.environ) is not None

    def span_exporter(self, service: str) -> SpanExporter | None:
        """Start the export; None, without loading OpenTelemetry, if no traces are exported. OSError
        if its variables have values that it refuses."""
        if not self.exports_traces:
            return None
        otlp = import_module("quire.service.tracing.otlp")
        try:
            exporter: SpanExporter = otlp.OtlpExporter(service, self.otlp_traces_endpoint)
        except Exception as error:
            raise OSError(f"cannot export traces: {error}") from error
        return exporter


def endpoint_variable(environment: Mapping[str, str]) -> str | None:
    """The standard variable that names a receiver of gRPC; None if none does, or if others switch
    traces off or choose another protocol."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if environment.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() not in ("otlp", ""):
        return None
    protocols = [environment[name] for name in _PROTOCOLS if environment.get(name)]
    if protocols and protocols[0].strip().lower() != "grpc":
        return None
    return next((name for name in _ENDPOINTS if environment.get(name)), None)


def check_endpoint(value: str) -> None:
    """ValueError unless it is the URL of a gRPC server."""
    if not is_http_url(value) or urlsplit(value).path.strip("/"):
        raise ValueError("must be http://host:port or https://host:port")


def is_installed() -> bool:
    """Whether the packages of the export are installed; loads none of them but empty parents."""
    try:
        return all(find_spec(package) is not None for package in PACKAGES)
    except ModuleNotFoundError:
        return False
