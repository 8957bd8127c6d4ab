"""Asks nodes of a Redis Cluster which of them has the scheduler's keys."""

import asyncio

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException

from scheduler_svc.store.links.servers import Servers, ask_all


async def find_node(servers: Servers) -> tuple[str, int]:
    """The node of a cluster with the slot of the key."""
    cluster = servers.cluster(await _with_names(servers))
    nodes = cluster.nodes_manager
    try:
        # Not `cluster.initialize()`: it asks the first primary for its commands, and fails while
        # that one is dead, though it has other slots.
        await nodes.initialize()
        node = cluster.get_node_from_key(servers.key)
    except RedisClusterException as error:
        # It is no RedisError.
        raise RedisConnectionError(_with_reason(error)) from error
    except IndexError as error:
        # The client takes a first primary for granted.
        raise RedisConnectionError("no node of the Redis Cluster has slots") from error
    finally:
        # To the end if it is cancelled meanwhile: the client logs connections that stay open.
        closing = (nodes.aclose("startup_nodes"), nodes.aclose())
        await asyncio.shield(asyncio.gather(*closing, return_exceptions=True))
    assert node is not None
    return str(node.host), int(node.port)


async def _with_names(servers: Servers) -> list[tuple[str, int]]:
    """The addresses whose name servers respond: the client would wait for the others."""

    async def looked_up(host: str, port: int) -> tuple[str, int] | None:
        return (host, port) if await servers.look_up(host, port) else None

    responses = await ask_all(
        (looked_up(*address) for address in servers.addresses),
        lambda response: response is not None,
    )
    found = [response for response in responses if response is not None]
    if not found:
        names = ", ".join(host for host, _ in servers.addresses)
        raise RedisConnectionError(f"the name servers of {names} have not responded")
    return found


def _with_reason(error: BaseException) -> str:
    """The message with that of the error behind it, such as a right that is missing: the client
    reports whatever a node refuses as a node that is in no cluster."""
    first: BaseException = error
    while (cause := first.__cause__ or first.__context__) is not None:
        first = cause
    return str(error) if str(first) in str(error) else f"{error} ({first})"
