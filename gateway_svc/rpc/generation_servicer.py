"""The base of the servicers that generate."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from gateway_svc.access.tenant import Tenant
from gateway_svc.generation.service import GenerationService
from gateway_svc.metrics.request_metrics import GatewayMetrics
from gateway_svc.rpc.call_interceptor import Context
from gateway_svc.rpc.deadlines import ended_at_deadline


class GenerationServicer:
    """Generates for the tenants of its calls, each until the call's deadline."""

    def __init__(
        self,
        generations: GenerationService,
        metrics: GatewayMetrics,
        tenant_of: Callable[[Context], Tenant],
    ) -> None:
        self._generations = generations
        self._metrics = metrics
        self._tenant_of = tenant_of

    def _until_deadline(self, context: Context) -> AbstractAsyncContextManager[None]:
        return ended_at_deadline(context.time_remaining(), self._generations.scheduler.outages)
