"""How long requests wait for their first row, by class of tenants."""

import time
from collections.abc import Callable
from typing import Final

from quire.service.metrics.histogram import Histogram

# The class of requests without a tenant, and of tenants without another class.
DEFAULT_CLASS: Final = "default"
# Those of the gateways' times to the first token, of which these are parts, and a shorter one.
_SECONDS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)


class QueueTimer:
    """The wait of one request, from its acceptance by this leader."""

    def __init__(self, histogram: Histogram, clock: Callable[[], float]) -> None:
        self._histogram = histogram
        self._clock = clock
        self._started_at = clock()

    def stop(self) -> None:
        self._histogram.observe(self._clock() - self._started_at)


class QueueTimes:
    """The classes of tenants, as gateways send them, and a histogram for each."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.by_class: dict[str, Histogram] = {DEFAULT_CLASS: Histogram(_SECONDS)}
        self._clock = clock
        # By principal.
        self._classes: dict[str, str] = {}

    def set_class(self, principal: str, tenant_class: str) -> None:
        """Set the class of a tenant; empty is the default one."""
        self._classes[principal] = tenant_class or DEFAULT_CLASS

    def start(self, principal: str) -> QueueTimer:
        """Begin to measure a new request of a tenant."""
        name = self._classes.get(principal, DEFAULT_CLASS)
        histogram = self.by_class.get(name)
        if histogram is None:
            histogram = self.by_class[name] = Histogram(_SECONDS)
        return QueueTimer(histogram, self._clock)
