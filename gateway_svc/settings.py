"""The gateway's settings."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator
from pydantic_settings import SettingsConfigDict

from gateway_svc.admission.web_pages import parse_origins
from gateway_svc.metrics.objectives import Objectives, parse_objectives
from gateway_svc.output_formats.formats import REASONING_SETTINGS, TOOL_SETTINGS
from quire.service.addresses import Address, check_address
from quire.service.metrics.server import MetricsAddress
from quire.service.settings import link_tls
from quire.service.tls import TLS
from quire.service.tracing.settings import TracedServiceSettings

_Text = Annotated[str, StringConstraints(min_length=1)]


def _check_addresses(value: str) -> str:
    """ValueError unless every part is an address."""
    return ",".join(check_address(part.strip()) for part in value.split(","))


def _check_origins(value: str) -> str:
    return ",".join(parse_origins(value))


def _check_objectives(value: str) -> str:
    parse_objectives(value)
    return value


def _one_of(*names: str) -> AfterValidator:
    """ValueError for a value that is not one of the names."""

    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return value

    return AfterValidator(check)


ToolCallParser = Annotated[str, _one_of(*TOOL_SETTINGS)]
ReasoningParser = Annotated[str, _one_of(*REASONING_SETTINGS)]
LatencyObjectives = Annotated[str, AfterValidator(_check_objectives)]
Origins = Annotated[str, AfterValidator(_check_origins)]
Addresses = Annotated[str, AfterValidator(_check_addresses)]


class GatewaySettings(TracedServiceSettings):
    """Flags and `QUIRE_GATEWAY_*` environment variables."""

    model_config = SettingsConfigDict(
        env_prefix="QUIRE_GATEWAY_", cli_prog_name="quire-gateway", protected_namespaces=()
    )

    listen: Address = Field(
        "127.0.0.1:50051", description="Address to serve the API on: host:port or unix:/path."
    )
    scheduler: Addresses = Field(
        "127.0.0.1:50052",
        description="Addresses of schedulers, separated by commas: host:port or unix:/path. A host "
        "name stands for every address it resolves to. The gateway finds the leaders of all shards "
        "among them.",
    )
    scheduler_tls_ca: Path | None = Field(
        None,
        description="PEM file with the authorities that schedulers are verified by; the gateway "
        "connects to them without TLS if absent. A certificate has the host in --scheduler.",
    )
    scheduler_tls_cert: Path | None = Field(
        None,
        description="PEM file with the gateway's certificate, for schedulers that ask for one.",
    )
    scheduler_tls_key: Path | None = Field(
        None, description="PEM file with the key of --scheduler-tls-cert."
    )
    scheduler_wait_s: float = Field(
        30.0,
        ge=0,
        description="Seconds that requests wait for a scheduler while none is available.",
    )
    model: _Text = Field(
        description="Folder in Hugging Face format, or hub id, of the model to tokenize for."
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of the hub id; the default branch if not set."
    )
    served_model_name: _Text | None = Field(
        None, description="Model name in the API; the value of --model if not set."
    )
    api_keys: Path | None = Field(
        None,
        description="YAML file with the tenants and the hashes of their API keys; without it every "
        "call is accepted. It is read again when it changes.",
    )
    tool_call_parser: ToolCallParser = Field(
        "auto",
        description="Format in which the model calls tools: a name from docs/tools.md, none, or "
        "auto, that of the chat template.",
    )
    reasoning_parser: ReasoningParser = Field(
        "auto",
        description="Format of the model's reasoning: a name from docs/tools.md, none, or auto, "
        "that of the chat template.",
    )
    tokenizer_threads: int = Field(
        2, ge=1, le=64, description="Threads that tokenize prompts and render chat templates."
    )
    max_queued_tokens: int = Field(
        8192,
        ge=1,
        description="Maximum tokens queued for a slow client; its stream fails beyond them.",
    )
    stream_interval: int = Field(
        1,
        ge=1,
        le=31,  # Deferred delivery has 32.
        description="Tokens of a choice that a stream receives together, after its first one. More "
        "than 1 is less smooth, and needs less processor time per token, most of all where a "
        "worker may then decode several tokens per plan.",
    )
    http_listen: MetricsAddress | None = Field(
        None,
        description="Address to serve OpenAI's HTTP API on, host:port; not served if not set.",
    )
    http_address_file: Path | None = Field(
        None, description="File that receives the bound address of the HTTP API."
    )
    http_allowed_origins: Origins | None = Field(
        None,
        description="Origins of web pages that may use the HTTP API, and of proxies before the "
        "gateway, separated by commas: https://chat.example.com, for example, or * for every page. "
        "Without it only the gateway's own page may. See docs/http.md.",
    )
    max_connection_age_s: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="Seconds after which a client's connection is closed, so that clients behind a "
        "load balancer of connections spread again; over gRPC calls in progress run on, over HTTP "
        "it is closed with the next response. Never if not set.",
    )
    max_live_calls: int = Field(
        10_000,
        ge=1,
        description="Maximum calls served at once; as many more may wait for their request over "
        "gRPC. Calls beyond either are refused with a time to retry.",
    )
    max_request_bytes: int = Field(
        256 * 2**20,
        ge=1,
        description="Maximum bytes of the requests of all live calls together; as many more may "
        "be in requests that are being received over gRPC. Calls beyond either are refused with a "
        "time to retry.",
    )
    max_resume_window_s: int = Field(
        60, ge=0, description="Largest resume_window_s that a request may have."
    )
    background_window_s: int = Field(
        3600,
        ge=0,
        le=2**31 - 1,
        description="Seconds that a response in the background runs without a client; 0 refuses "
        "such responses.",
    )
    metrics_listen: MetricsAddress | None = Field(
        None, description="Address to serve metrics on over HTTP, host:port; not served if not set."
    )
    trace_sampling_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of the traces begun here that are recorded; a client's decision, in its "
        "traceparent, is kept.",
    )

    slo: LatencyObjectives = Field(
        "default=2:0.2",
        description="Latency objectives by class of tenants, for the metrics of goodput: "
        "CLASS=TTFT:ITL, separated by commas, with the seconds to the first token and between "
        "tokens. A class without its own has those of default.",
    )

    @model_validator(mode="after")
    def _has_usable_scheduler_tls(self) -> Self:
        link_tls(
            "scheduler", self.scheduler_tls_ca, self.scheduler_tls_cert, self.scheduler_tls_key
        )
        return self

    @property
    def scheduler_tls(self) -> TLS | None:
        """The TLS of the connection to schedulers; None without."""
        return link_tls(
            "scheduler", self.scheduler_tls_ca, self.scheduler_tls_cert, self.scheduler_tls_key
        )

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        return () if self.http_allowed_origins is None else parse_origins(self.http_allowed_origins)

    @property
    def objectives(self) -> Objectives:
        return parse_objectives(self.slo)

    @property
    def scheduler_addresses(self) -> tuple[str, ...]:
        return tuple(self.scheduler.split(","))
