"""The gateway's settings."""

from typing import Annotated

from pydantic import Field, StringConstraints
from pydantic_settings import SettingsConfigDict

from quire.service.addresses import Address
from quire.service.metrics import MetricsAddress
from quire.service.settings import ServiceSettings

_Text = Annotated[str, StringConstraints(min_length=1)]


class GatewaySettings(ServiceSettings):
    """Flags and `QUIRE_GATEWAY_*` environment variables."""

    model_config = SettingsConfigDict(
        env_prefix="QUIRE_GATEWAY_", cli_prog_name="quire-gateway", protected_namespaces=()
    )

    listen: Address = Field(
        "127.0.0.1:50051", description="Where the API is served: host:port or unix:/path."
    )
    scheduler: Address = Field(
        "127.0.0.1:50052", description="The scheduler's address: host:port or unix:/path."
    )
    model: _Text = Field(
        description="Folder in Hugging Face format, or a hub id, whose tokenizer is served."
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of the hub id; the default branch if absent."
    )
    served_model_name: _Text | None = Field(
        None, description="What requests call the model; as --model if absent."
    )
    tokenizer_threads: int = Field(
        2, ge=1, le=64, description="Threads that tokenize prompts and render conversations."
    )
    max_queued_tokens: int = Field(
        8192,
        ge=1,
        description="Tokens that wait for a client that reads slowly before its stream is ended.",
    )
    metrics_listen: MetricsAddress | None = Field(
        None, description="Where metrics are served over HTTP: host:port; nowhere if absent."
    )
