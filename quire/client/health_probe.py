"""Probes a server's health."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.client.arguments import check_text, deadline
from quire.client.errors import QuireError, translate_errors
from quire.client.targets import check_target, client_options
from quire.service.tls import TLS, open_channel

SERVING: int = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING


def is_serving(
    target: str,
    service: str = "ready",
    timeout_s: float | None = 5.0,
    tls: TLS | None = None,
) -> bool:
    """Whether a service is serving: "" is the process, "ready" includes all it depends on.

    QuireError if no server responds, or if the service is unknown (NOT_FOUND).
    """
    return health_of(target, service, timeout_s, tls) == SERVING


def health_of(target: str, service: str, timeout_s: float | None, tls: TLS | None = None) -> int:
    """The `grpc.health.v1` serving status of a service. QuireError as for `is_serving`."""
    check_target(target)
    check_text("service", service)
    request = health_pb2.HealthCheckRequest(service=service)
    timeout = deadline("timeout_s", timeout_s)
    with (
        _name_unknown_service(target, service),
        translate_errors(target),
        open_channel(target, client_options(target), tls) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        response = stub.Check(request, timeout=timeout)  # type: ignore[attr-defined]
        return int(response.status)


@contextmanager
def _name_unknown_service(target: str, service: str) -> Iterator[None]:
    """Add the service's name to NOT_FOUND, which the health service omits."""
    try:
        yield
    except QuireError as error:
        if error.code is not grpc.StatusCode.NOT_FOUND:
            raise
        raise QuireError(error.code, f"no service {service!r} at {target}") from error
