"""What a server permits its clients."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What a client may do with a connection, and all clients together."""

    max_message_bytes: int
    # At once, those included that are cancelled and have not ended.
    max_calls: int = 1000
    # A connection of about this age accepts no more calls; None: of any age.
    max_age_s: float | None = None
    # Of all calls of the server, received and not read by their handlers; None: no limit.
    max_unread_bytes: int | None = None
    # Calls of the server that wait for a message of their client; None: no limit.
    max_waiting_calls: int | None = None
