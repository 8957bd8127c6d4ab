"""gRPC options, set on purpose: message limits, keepalive that notices a dead peer in seconds."""

from typing import Any

_Options = list[tuple[str, Any]]

# Twice what any prompt needs: a text that is far too long reaches the gateway's own check, which
# names the field, instead of gRPC's, which cannot.
PUBLIC_MESSAGE_BYTES = 32 * 2**20
INTERNAL_MESSAGE_BYTES = 64 * 2**20


def channel_options(max_message_bytes: int = PUBLIC_MESSAGE_BYTES) -> _Options:
    """Options of a client's channel."""
    return [
        *_limits(max_message_bytes),
        ("grpc.keepalive_time_ms", 20_000),
        # What bounds the detection of a hung peer; grpc.keepalive_timeout_ms does not.
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]


def link_options() -> _Options:
    """Options of a gateway's channel to a scheduler: one that is stopped or cut off is noticed
    within about two seconds, and each channel connects by itself."""
    return [
        *_limits(INTERNAL_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", 1_000),
        ("grpc.http2.ping_timeout_ms", 1_000),
        # Without it a quiet stream is pinged twice, and then hardly ever.
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(max_message_bytes: int = PUBLIC_MESSAGE_BYTES) -> _Options:
    """Options of a server. Clients may ping it twice a second: those that go on elsewhere want to
    know soon that it has stopped."""
    return [
        *_limits(max_message_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        # The key that servers read; its shorter namesake leaves quiet calls to die of pings.
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _limits(max_message_bytes: int) -> _Options:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]
