"""Options of gRPC channels: message limits, and keepalive that detects a dead peer."""

from typing import Any

_Options = list[tuple[str, Any]]

# Twice the longest prompt, so that an oversized text reaches the gateway's check, which names the
# field; gRPC's own does not.
PUBLIC_MESSAGE_BYTES = 32 * 2**20
INTERNAL_MESSAGE_BYTES = 64 * 2**20


def channel_options(max_message_bytes: int = PUBLIC_MESSAGE_BYTES) -> _Options:
    """Options of a client's channel."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 20_000),
        # Bounds the detection of a hung peer; grpc.keepalive_timeout_ms does not.
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # The least time that a connection may take to be made; those to addresses that do not
        # respond take as long to fail.
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]
