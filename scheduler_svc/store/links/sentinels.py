"""Asks Sentinels for the primary of their service."""

from typing import Any, NamedTuple

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from scheduler_svc.store.links.link import CLOSED
from scheduler_svc.store.links.servers import Servers, ask_all


class _Named(NamedTuple):
    """A primary, by a Sentinel."""

    address: tuple[str, int]
    # Greater after each failover.
    config_epoch: int


async def find_primary(servers: Servers) -> tuple[str, int]:
    """The primary of the newest configuration that a Sentinel has.

    All of them are asked at once: one that hangs would take the time of those after it, and one
    that was cut off from the others may still name the primary before a failover.
    """
    responses = await ask_all(
        (_ask(servers, *address) for address in servers.addresses),
        lambda response: isinstance(response, _Named),
    )
    found = [response for response in responses if isinstance(response, _Named)]
    if not found:
        # In the order of the URL, whichever responds first: reasons are logged once.
        reasons = "; ".join(map(str, responses))
        raise RedisConnectionError(f"no Sentinel names a primary of {servers.service!r}: {reasons}")
    return max(found, key=lambda named: named.config_epoch).address


async def _ask(servers: Servers, host: str, port: int) -> _Named | str:
    """The primary that a Sentinel names, or why it names none."""
    if not await servers.look_up(host, port):
        return f"{host}:{port}: its name server has not responded"
    client = servers.sentinel(host, port)
    try:
        # By their names, unlike the type of newer protocols.
        masters: Any = await client.sentinel_masters()
    except CLOSED:
        return f"{host}:{port} has closed the connection"
    except (RedisError, OSError) as error:
        return f"{host}:{port}: {error}"
    finally:
        await client.aclose()
    state = masters.get(servers.service)
    if state is None:
        return f"{host}:{port} does not monitor it"
    if not state["is_master"] or state["is_sdown"] or state["is_odown"]:
        return f"{host}:{port}: {state['ip']}:{state['port']} is down"
    return _Named((state["ip"], state["port"]), state["config-epoch"])
