"""Addresses of workers: a list in which a host name stands for all that it resolves to."""

import asyncio
import socket
from collections.abc import Callable

import structlog

log = structlog.get_logger()

LOOKUP_INTERVAL_S = 1.0


class Names:
    """Looks every name up once a second, each by itself: a slow one holds nobody up.

    A name that does not resolve keeps the addresses it had: an absence from DNS closes nothing.
    """

    def __init__(self, names: tuple[str, ...], on_news: Callable[[], None]) -> None:
        """`on_news`: a name stands for other addresses than before."""
        self._answers: dict[str, frozenset[str]] = {name: frozenset() for name in names}
        self._on_news = on_news
        self._failing: set[str] = set()

    @property
    def addresses(self) -> frozenset[str]:
        """All that the names stand for."""
        return frozenset().union(*self._answers.values())

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for name in self._answers:
                group.create_task(self._keep(name))

    async def _keep(self, name: str) -> None:
        if name.startswith("unix:"):
            self._take(name, frozenset({name}))
            return
        while True:
            await self._look_up(name)
            await asyncio.sleep(LOOKUP_INTERVAL_S)

    async def _look_up(self, name: str) -> None:
        try:
            self._take(name, await _resolve(name))
            self._failing.discard(name)
        except (OSError, UnicodeError) as error:
            # Said once, not every second.
            if name not in self._failing:
                self._failing.add(name)
                log.warning("name does not resolve", name=name, why=str(error))

    def _take(self, name: str, answer: frozenset[str]) -> None:
        if answer != self._answers[name]:
            self._answers[name] = answer
            self._on_news()


async def _resolve(name: str) -> frozenset[str]:
    host, _, port = name.rpartition(":")
    infos = await asyncio.get_running_loop().getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM
    )
    return frozenset(_target(family, str(address[0]), port) for family, *_, address in infos)


def _target(family: int, host: str, port: str) -> str:
    return f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
