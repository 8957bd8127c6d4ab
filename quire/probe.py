"""Asks a server for its health."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.arguments import check_text, deadline
from quire.errors import QuireError, clear_errors
from quire.targets import check_target, client_options

SERVING: int = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING


def is_serving(target: str, service: str = "ready", timeout_s: float | None = 5.0) -> bool:
    """Whether a service is well: "" is the process, "ready" all it depends on.

    QuireError if nobody answers, or if the service is unknown (NOT_FOUND).
    """
    return health_of(target, service, timeout_s) == SERVING


def health_of(target: str, service: str, timeout_s: float | None) -> int:
    """The `grpc.health.v1` serving status of a service. QuireError as for `is_serving`."""
    check_target(target)
    check_text("service", service)
    request = health_pb2.HealthCheckRequest(service=service)
    timeout = deadline("timeout_s", timeout_s)
    with (
        _unknown_named(target, service),
        clear_errors(target),
        grpc.insecure_channel(target, options=client_options(target)) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        response = stub.Check(request, timeout=timeout)  # type: ignore[attr-defined]
        return int(response.status)


@contextmanager
def _unknown_named(target: str, service: str) -> Iterator[None]:
    """The health service says NOT_FOUND, and not what."""
    try:
        yield
    except QuireError as error:
        if error.code is not grpc.StatusCode.NOT_FOUND:
            raise
        raise QuireError(error.code, f"no service {service!r} at {target}") from error
