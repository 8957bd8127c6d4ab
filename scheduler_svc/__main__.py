"""`python -m scheduler_svc`: runs the scheduler."""

import asyncio

from quire.service.lifecycle import Signals
from quire.service.logs import configure_logging
from scheduler_svc.server import Scheduler
from scheduler_svc.settings import SchedulerSettings


async def _run(settings: SchedulerSettings) -> None:
    signals = Signals()
    signals.install()
    await Scheduler(settings, signals).serve()


def main() -> None:
    settings = SchedulerSettings.load()
    configure_logging("scheduler", settings.log_level, settings.log_format)
    asyncio.run(_run(settings))


if __name__ == "__main__":
    main()
