"""Addresses of schedulers: a list in which a host name stands for all that it resolves to."""

import asyncio
import socket
from collections.abc import Sequence

import structlog

log = structlog.get_logger()

LOOKUP_INTERVAL_S = 1.0


class Addresses:
    """Each name is looked up by itself: a slow one holds nobody up.

    One that does not resolve keeps the addresses it had.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._known = dict.fromkeys(names, frozenset[str]())
        for name in filter(_is_path, names):
            self._known[name] = frozenset({name})
        self._failing: set[str] = set()

    @property
    def known(self) -> frozenset[str]:
        """All that the names stand for, as far as that is known."""
        return frozenset().union(*self._known.values())

    async def look_up(self) -> None:
        """Again and again, until cancelled."""
        while True:
            names = (name for name in self._known if not _is_path(name))
            await asyncio.gather(*map(self._look_up, names))
            await asyncio.sleep(LOOKUP_INTERVAL_S)

    async def _look_up(self, name: str) -> None:
        try:
            self._known[name] = await _resolve(name)
            self._failing.discard(name)
        except (OSError, UnicodeError) as error:
            # Said once, not every second.
            if name not in self._failing:
                self._failing.add(name)
                log.warning("name does not resolve", name=name, reason=str(error))


def _is_path(name: str) -> bool:
    return name.startswith("unix:")


async def _resolve(name: str) -> frozenset[str]:
    host, _, port = name.rpartition(":")
    infos = await asyncio.get_running_loop().getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM
    )
    return frozenset(_target(family, str(address[0]), port) for family, *_, address in infos)


def _target(family: int, host: str, port: str) -> str:
    return f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
