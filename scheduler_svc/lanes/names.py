"""Addresses of workers: a list in which a host name stands for all that it resolves to."""

import asyncio
import socket

import structlog

log = structlog.get_logger()


async def resolve(names: tuple[str, ...]) -> set[str]:
    """Every address the names stand for now. A name that does not resolve stands for none."""
    found = await asyncio.gather(*(_resolve_one(name) for name in names))
    return set().union(*found)


async def _resolve_one(name: str) -> set[str]:
    if name.startswith("unix:"):
        return {name}
    host, _, port = name.rpartition(":")
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )
    except OSError as error:
        log.debug("name does not resolve", name=name, error=str(error))
        return set()
    return {_target(family, str(address[0]), port) for family, _, _, _, address in infos}


def _target(family: int, host: str, port: str) -> str:
    return f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
