"""Asks a server for its health."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.errors import clear_errors
from quire.targets import client_options

SERVING: int = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING


def is_serving(target: str, service: str = "ready", timeout_s: float = 5.0) -> bool:
    """Whether a service is well: "" is the process, "ready" all it depends on.

    QuireError if nobody answers, or if the service is unknown (NOT_FOUND).
    """
    return health_of(target, service, timeout_s) == SERVING


def health_of(target: str, service: str, timeout_s: float) -> int:
    """The `grpc.health.v1` serving status of a service. QuireError as for `is_serving`."""
    request = health_pb2.HealthCheckRequest(service=service)
    with (
        clear_errors(target),
        grpc.insecure_channel(target, options=client_options(target)) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        response = stub.Check(request, timeout=timeout_s)  # type: ignore[attr-defined]
        return int(response.status)
