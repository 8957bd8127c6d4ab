"""The environment variables that begin with `QUIRE_`."""

import difflib
from collections.abc import Iterable
from typing import Final

from quire.service.settings import SERVICE_LINK

_PREFIX: Final = "QUIRE_"
# Services refuse unknown variables with their own prefixes.
_SERVICES: Final = ("QUIRE_GATEWAY_", "QUIRE_SCHEDULER_", "QUIRE_WORKER_")
# What else is read: by the command's options first.
_KNOWN: Final = frozenset(
    f"QUIRE_{name}"
    for name in (
        *("TARGET", "API_KEY", "TLS", "TLS_CA", "TLS_CERT", "TLS_KEY", "TLS_SERVER_NAME"),
        # Of docker-compose.yml and its builds, which may be set in the same shell.
        *("CERTIFICATES", "DRAIN_GRACE_S", "HTTP_PORT", "HTTP_PORT_2", "HUB_CACHE", "IMAGE"),
        *("MODEL", "MODEL_DIR", "MODEL_NAME", "PORT", "PORT_2", "TAG", "WEIGHT_CACHE"),
        # Of the kernels' builds and the tests.
        *("KERNEL_CACHE", "TEST_DEVICE"),
    )
)


def refuse_unknown_variables(names: Iterable[str]) -> None:
    """ValueError for a variable that nothing reads, mostly a mistyped one. The message does not
    have its value, which may be a key."""
    for name in names:
        known = name in _KNOWN or name.startswith(_SERVICES) or SERVICE_LINK.search(name)
        if not name.startswith(_PREFIX) or known:
            continue
        close = difflib.get_close_matches(name, [*_KNOWN, *_SERVICES], n=1)
        hint = f"; {close[0]} is similar" if close else ""
        raise ValueError(f"{name}: no such setting{hint}")
