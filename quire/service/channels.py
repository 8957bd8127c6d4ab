"""gRPC channel and server options: message limits, and keepalive that detects a dead peer."""

from typing import Any

_Options = list[tuple[str, Any]]

# Twice the longest prompt, so that an oversized text reaches the gateway's check, which names the
# field; gRPC's own does not.
PUBLIC_MESSAGE_BYTES = 32 * 2**20
INTERNAL_MESSAGE_BYTES = 64 * 2**20
# Calls that gRPC's core holds until the server's event loop accepts them; beyond them, and after
# the time, it resets calls with a bare CANCELLED. Its defaults, 1,000 calls and 30 s, are reached
# by one client's burst.
_MAX_PENDING_CALLS = 100_000
_MAX_PENDING_S = 600


def channel_options(max_message_bytes: int = PUBLIC_MESSAGE_BYTES) -> _Options:
    """Options of a client's channel."""
    return [
        *_limits(max_message_bytes),
        ("grpc.keepalive_time_ms", 20_000),
        # Bounds the detection of a hung peer; grpc.keepalive_timeout_ms does not.
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]


def server_options(
    max_message_bytes: int = PUBLIC_MESSAGE_BYTES, max_request_bytes: int | None = None
) -> _Options:
    """Options of a server; requests may have a limit of their own. It permits two pings a second,
    so that clients detect a failure early and retry elsewhere."""
    return [
        *_limits(max_message_bytes, max_request_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        # Servers ignore the key without `http2.`, and close idle calls for too many pings.
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
        ("grpc.server_max_unrequested_time_in_server", _MAX_PENDING_S),
    ]


def _limits(max_message_bytes: int, max_received_bytes: int | None = None) -> _Options:
    return [
        ("grpc.max_receive_message_length", max_received_bytes or max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]
