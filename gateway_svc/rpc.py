"""What every public call does at its rim: errors become statuses, and it counts as live."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import structlog

from quire.service.errors import RequestError, abort

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]


class Calls:
    """The calls that are being answered."""

    def __init__(self) -> None:
        self._num_live = 0
        self._none_live = asyncio.Event()
        self._none_live.set()

    @property
    def num_live(self) -> int:
        return self._num_live

    async def none_live(self) -> None:
        await self._none_live.wait()

    @asynccontextmanager
    async def answering(self, context: Context) -> AsyncIterator[None]:
        """Ends the call with a RequestError's status, and with INTERNAL for what nobody foresaw."""
        self._num_live += 1
        self._none_live.clear()
        try:
            yield
        except RequestError as error:
            await abort(context, error)
        except Exception:
            log.exception("a call failed unexpectedly")
            await context.abort(grpc.StatusCode.INTERNAL, "internal error")
        finally:
            self._num_live -= 1
            if not self._num_live:
                self._none_live.set()
