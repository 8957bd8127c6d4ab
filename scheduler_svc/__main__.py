"""`python -m scheduler_svc`: runs the scheduler."""

import asyncio
import sys

import structlog
import uvloop

from quire.service.lifecycle import Signals, end_at_interrupts, raise_file_limit
from quire.service.logs import configure_logging
from quire.service.settings import stop
from scheduler_svc.huge_pages import keep_in_huge_pages
from scheduler_svc.server import Scheduler
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.shard import leaves
from scheduler_svc.store.errors import StoreError
from scheduler_svc.store.links.urls import link_to

log = structlog.get_logger()


async def _run(settings: SchedulerSettings) -> None:
    signals = Signals()
    signals.install()
    in_huge_pages = asyncio.create_task(keep_in_huge_pages())
    try:
        await Scheduler(settings, signals).serve()
    finally:
        in_huge_pages.cancel()


def main() -> None:
    end_at_interrupts()
    raise_file_limit()
    settings = SchedulerSettings.load()
    try:
        # The settings themselves are also read where no client of Redis is installed.
        link_to(settings.redis_url, timeout_s=1)
    except ValueError as error:
        stop("quire-scheduler", [f"--redis-url / QUIRE_SCHEDULER_REDIS_URL: {error}"])
    configure_logging("scheduler", settings.log_level, settings.log_format)
    try:
        uvloop.run(_run(settings))
    except* OSError as errors:
        _stop("cannot start", errors)
    except* StoreError as errors:
        # Another scheduler leads, or Redis lost data: a restart competes for leadership again.
        _stop("stopped by Redis", errors)


def _stop(what: str, errors: BaseExceptionGroup[Exception]) -> None:
    for error in leaves(errors):
        log.error(what, reason=f"{type(error).__name__}: {error}")
    sys.exit(1)


if __name__ == "__main__":
    main()
