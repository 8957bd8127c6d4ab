"""The scheduler's settings."""

import ipaddress
import os
import re
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import parse_qsl, urlsplit

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from quire.service.addresses import Address
from quire.service.metrics.server import MetricsAddress
from quire.service.settings import link_tls
from quire.service.tls import TLS
from quire.service.tracing.settings import TracedServiceSettings
from scheduler_svc.core.placement import Placement
from scheduler_svc.core.view import Policy, PreemptionMode
from scheduler_svc.kubernetes.names import PREFIX, ApiServer, ServiceName

_LABEL = r"[A-Za-z0-9_-]{1,63}"
_IPV6 = r"\[[0-9a-fA-F:.]+(?:%[^\s\]]+)?\]"
_ADDRESS = re.compile(rf"unix:.+|(?:{_IPV6}|{_LABEL}(?:\.{_LABEL})*\.?):(\d{{1,5}})")
_REDIS_URL = re.compile(r"rediss?(\+sentinel|\+cluster)?://.+|unix://.+")

# The help lists the values of literals, but the names of an enum's members.
_PreemptionMode = Literal[PreemptionMode.AUTO, PreemptionMode.RECOMPUTE, PreemptionMode.SWAP]


def _without_brackets(value: str) -> str:
    """The address without brackets around one of IPv4."""
    name, _, port = value.rpartition(":")
    try:
        return f"{ipaddress.IPv4Address(name.removeprefix('[').removesuffix(']'))}:{port}"
    except ValueError:
        return value


class SchedulerSettings(TracedServiceSettings):
    """The scheduler: decides which sequences run, on which worker, with which blocks."""

    model_config = SettingsConfigDict(
        env_prefix="QUIRE_SCHEDULER_", cli_prog_name="quire-scheduler"
    )

    listen: Address = Field(
        "127.0.0.1:50052", description="host:port (port 0: a free one) or unix:/path."
    )
    redis_url: str = Field(
        description="redis://[:password@]host:port/db, rediss://... or unix:///path/redis.sock; "
        "redis+sentinel://[:password@]host:port,.../service and redis+cluster://host:port,... name "
        "Sentinels and nodes of a cluster."
    )
    redis_password_file: Path | None = Field(
        None,
        description="File with Redis' password, such as a container's secret, instead of a "
        "password in the URL; read once at the start.",
    )
    workers: str = Field(
        description="Workers, separated by commas: host:port or unix:/path. A host name stands "
        "for every address it resolves to, and is resolved every second. "
        "kubernetes:SERVICE[.NAMESPACE]:PORT stands for the pods of a Service, whose "
        "EndpointSlices are watched (docs/kubernetes.md)."
    )
    worker_tls_ca: Path | None = Field(
        None,
        description="PEM file with the authorities that workers are verified by; the scheduler "
        "connects to them without TLS if absent. A certificate has the host in --workers.",
    )
    worker_tls_cert: Path | None = Field(
        None, description="PEM file with the scheduler's certificate, for workers that ask for one."
    )
    worker_tls_key: Path | None = Field(
        None, description="PEM file with the key of --worker-tls-cert."
    )
    peer_tls_ca: Path | None = Field(
        None,
        description="PEM file with the authorities that other schedulers are verified by; a "
        "scheduler watches leaders of shards without TLS if absent. If they have TLS, their death "
        "is then noticed by their leases alone. A certificate has the host in --advertise.",
    )
    peer_tls_cert: Path | None = Field(
        None,
        description="PEM file with the scheduler's certificate, for schedulers that ask for one.",
    )
    peer_tls_key: Path | None = Field(None, description="PEM file with the key of --peer-tls-cert.")
    max_num_batched_tokens: int = Field(
        2048, ge=1, description="Maximum tokens per step of a worker; longer prompts are chunked."
    )
    max_num_seqs: int = Field(256, ge=1, description="Maximum sequences per step of a worker.")
    batch_policy: Literal[Policy.CHUNKED, Policy.PREFILL_FIRST] = Field(
        Policy.CHUNKED,
        description="Composition of a step; chunked: decodes and chunks of prompts together; "
        "prefill_first: prompts while there are any, else decodes.",
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        "fcfs",
        description="Order of service; fcfs: by arrival; priority: by priority, then arrival.",
    )
    max_num_partial_prefills: int | None = Field(
        None,
        ge=1,
        description="Maximum prompts that a step leaves partially computed; no limit if absent.",
    )
    max_long_partial_prefills: int | None = Field(
        None,
        ge=1,
        description="Maximum long prompts in progress; shorter ones overtake those that wait; no "
        "limit if absent.",
    )
    long_prefill_token_threshold: int = Field(
        0,
        ge=0,
        description="A prompt with more tokens to compute is long, and gets at most this many per "
        "step while other prompts wait; 0: no prompt is long.",
    )
    max_prefill_s: float = Field(
        0.25,
        ge=0,
        description="Seconds that a step with decodes and prompts may take, approximately: where a "
        "worker computes slowly, prompts get fewer tokens per step, so that streams do not pause. "
        "A step may always take twice as long as one without prompts. 0: no limit.",
    )
    preemption_mode: _PreemptionMode = Field(
        PreemptionMode.AUTO,
        description="How running sequences are preempted when blocks run out; recompute, swap (to "
        "the worker's swap space), or auto: swap groups of several, recompute single sequences.",
    )
    num_lookahead_slots: int = Field(
        0, ge=0, description="Slots kept free for each decoding sequence beyond its next token."
    )
    pipeline_depth: int = Field(
        2,
        ge=1,
        le=8,
        description="Maximum plans in flight per worker; one with more stages has one for each.",
    )
    multi_step_s: float = Field(
        0.1,
        ge=0,
        description="Maximum seconds of decoding in one plan while no client gets its tokens one "
        "by one; also at most a tenth of the time since the last request arrived. 0: one token "
        "per sequence and plan, and an idle worker starts at once instead of waiting 2 to 20 ms to "
        "batch unary requests.",
    )
    placement: Literal[Placement.LEAST_WORK, Placement.ROUND_ROBIN] = Field(
        Placement.LEAST_WORK,
        description="How a worker with room is chosen; least_work: by the fewest tokens to compute "
        "before the request's first token, cached ones excluded; round_robin: the next one.",
    )
    max_waiting_requests: int = Field(
        10_000, ge=1, description="Maximum queued requests; more are refused with a time to retry."
    )
    max_waiting_tokens: int = Field(20_000_000, ge=1, description="Maximum queued tokens.")
    watermark: float = Field(
        0.01, ge=0, lt=1, description="Fraction of a pool's blocks that new requests leave free."
    )
    enable_prefix_caching: bool = Field(
        True, description="Reuse the blocks of equal prompt prefixes."
    )
    check_every_step: bool = Field(
        False,
        description="Check each pool against its lane after every step, not only when idle; slow.",
    )
    finished_ttl_s: int = Field(
        600,
        ge=1,
        le=10**9,
        description="Seconds for which the record of a finished request stays in Redis.",
    )
    finished_max_bytes: int = Field(
        256 * 2**20,
        ge=0,
        description="Maximum bytes of these records; beyond it the oldest are deleted early.",
    )
    orphan_grace_s: float = Field(
        30,
        ge=0,
        description="Seconds that a request runs on after its gateway has disconnected, unless "
        "another one attaches to it.",
    )
    lease_s: float = Field(
        2,
        ge=0.1,
        le=86_400,
        description="Seconds after its last renewal at which the leader of a shard is replaced, "
        "and after its last heartbeat at which a scheduler counts as ended. The same for all "
        "schedulers.",
    )
    advertise: Annotated[Address, BeforeValidator(_without_brackets)] | None = Field(
        None,
        description="Address at which gateways reach this scheduler, as standbys report it; if "
        "absent, the one of --listen. An IPv4 address may be in brackets, too, for manifests that "
        "know only a variable.",
    )
    step_timeout_s: float = Field(
        60,
        ge=0.1,
        description="Seconds that a worker may take for a step before it counts as lost.",
    )
    metrics_listen: MetricsAddress | None = Field(
        None, description="Address of the HTTP metrics endpoint: host:port; off if absent."
    )

    @field_validator("workers")
    @classmethod
    def _has_addresses(cls, value: str) -> str:
        for part in value.split(","):
            if part.strip().startswith(PREFIX):
                ServiceName.parse(part.strip())
                ApiServer.of_pod(os.environ)
                continue
            match = _ADDRESS.fullmatch(part.strip())
            if match is None or not 0 < int(match[1] or 1) < 2**16:
                raise ValueError(
                    f"{part.strip()!r} is neither host:port, [IPv6 address]:port nor unix:/path"
                )
        return value

    @field_validator("redis_url")
    @classmethod
    def _is_redis_url(cls, value: str) -> str:
        if not _REDIS_URL.fullmatch(value):
            raise ValueError(
                "must begin with redis://, rediss://, unix://, redis+sentinel://, "
                "rediss+sentinel://, redis+cluster:// or rediss+cluster://"
            )
        files = dict(parse_qsl(urlsplit(value).query))
        ca, cert, key = (files.get(f"ssl_{name}") for name in ("ca_certs", "certfile", "keyfile"))
        if ca or cert or key:
            # TLSError if one cannot be used. The certificate's file may have the key, too.
            TLS(ca, cert, key or cert)
        return value

    @model_validator(mode="after")
    def _has_usable_tls(self) -> Self:
        # Checked once: at the start of a later term the files may be in the middle of a renewal.
        _ = self.worker_tls, self.peer_tls
        return self

    @cached_property
    def peer_tls(self) -> TLS | None:
        """The TLS of connections to other schedulers; None without."""
        return link_tls("peer", self.peer_tls_ca, self.peer_tls_cert, self.peer_tls_key)

    @cached_property
    def worker_tls(self) -> TLS | None:
        """The TLS of connections to workers; None without."""
        return link_tls("worker", self.worker_tls_ca, self.worker_tls_cert, self.worker_tls_key)

    @field_validator("redis_password_file")
    @classmethod
    def _has_the_only_password(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None:
            _password_of(value)
            if urlsplit(info.data.get("redis_url", "")).password is not None:
                raise ValueError("the URL of Redis has a password, too; remove one of them")
        return value

    @cached_property
    def redis_password(self) -> str | None:
        """The password, as the file had it at the start; None without a file."""
        return None if self.redis_password_file is None else _password_of(self.redis_password_file)

    @property
    def worker_addresses(self) -> tuple[str, ...]:
        return tuple(part.strip() for part in self.workers.split(","))

    @property
    def api_server(self) -> ApiServer | None:
        """Kubernetes' API server; None if no worker is found by it."""
        is_needed = any(name.startswith(PREFIX) for name in self.worker_addresses)
        return ApiServer.of_pod(os.environ) if is_needed else None


def _password_of(file: Path) -> str:
    """Return a file's only line. ValueError if the file cannot be read or has no such line."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot be read: {error}") from error
    if len(lines) != 1 or not lines[0]:
        raise ValueError("the file must have the password as its only line")
    return lines[0]
