"""Options of gRPC's servers, which play peers of Quire's clients."""

from typing import Any

from quire.service.channels import PUBLIC_MESSAGE_BYTES


def server_options(max_message_bytes: int = PUBLIC_MESSAGE_BYTES) -> list[tuple[str, Any]]:
    """As Quire's server, they permit two pings a second."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.so_reuseport", 0),
        # Servers ignore the key without `http2.`, and close idle calls for too many pings.
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
