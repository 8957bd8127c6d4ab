"""Generation as every public API uses it: prepares, starts, resumes and cancels requests."""

from contextlib import AbstractAsyncContextManager, AbstractContextManager

import grpc

from gateway_svc.access.tenant import ANONYMOUS, Tenant
from gateway_svc.generation import generation, submission, tenant_limits, validation
from gateway_svc.generation.beam_search import Search
from gateway_svc.generation.generation import Generation
from gateway_svc.generation.submission import PreparedRequest, RequestsInPreparation
from gateway_svc.generation.validation import GenerationRequest
from gateway_svc.scheduler.shards import Shards
from gateway_svc.text.served_model import ServedModel
from gateway_svc.tracing.call_trace import CallTrace, current_trace
from gateway_svc.tracing.generation_attributes import add_request, add_submission
from quire.internal.v1 import gateway_pb2
from quire.service.errors import failed
from quire.v1 import inference_pb2


class GenerationService:
    """The requests of one gateway. A tenant scopes request ids and cached prefixes, and limits what
    its requests may ask for."""

    def __init__(
        self,
        served: ServedModel,
        scheduler: Shards,
        max_resume_window_s: int,
        background_window_s: int,
        stream_interval: int,
    ) -> None:
        self._stream_interval = stream_interval
        self._background_window_s = background_window_s
        self._max_resume_window_s = max_resume_window_s
        self.served = served
        self.scheduler = scheduler
        self._in_preparation = RequestsInPreparation()

    async def prepare(
        self,
        request: GenerationRequest,
        deadline_s: float | None,
        tenant: Tenant = ANONYMOUS,
        http: gateway_pb2.HttpState | None = None,
        search: Search | None = None,
    ) -> PreparedRequest:
        """Validate and tokenize a request, which can be cancelled meanwhile. RequestError names
        the invalid field. `deadline_s` is the time left to the client's call.
        `http` is stored for the rendering of the output. The resume window of a response in the
        background is set here. With a `search` it is a beam search."""
        trace = current_trace()
        if trace is not None and trace.is_recorded:
            add_request(trace, request)
        model = self.served.get(request.model if request.HasField("model") else None)
        if http is not None and http.background:
            request.resume_window_s = tenant_limits.background_window_s(
                self._background_window_s, tenant
            )
        else:
            validation.check_resume_window(request.resume_window_s, self._max_resume_window_s)
        with self._in_preparation.track(tenant.principal, request.request_id):
            await self.scheduler.wait_until_connected()
            prepared = await submission.prepare(
                request, model, self.scheduler.max_model_len, deadline_s, tenant, http, search
            )
        prepared.submission.stream_interval = self._stream_interval
        if trace is not None:
            _add_trace(prepared, trace)
        return prepared

    def in_preparation(self, request_id: str, tenant: Tenant) -> AbstractContextManager[None]:
        """Make a request of several parts cancellable by this id while they are prepared.
        RequestError at the end of the block if it was cancelled."""
        return self._in_preparation.track(tenant.principal, request_id)

    def start(self, prepared: PreparedRequest) -> AbstractAsyncContextManager[Generation]:
        """Submit a request. Exiting before its end cancels it, unless it may be resumed."""
        return generation.start(prepared, self.scheduler.requests)

    def resume(
        self, request: inference_pb2.ResumeGenerateRequest, tenant: Tenant = ANONYMOUS
    ) -> AbstractAsyncContextManager[Generation]:
        """Resume a live or finished request; exit as `start` does."""
        validation.check_resume_request(request)
        return generation.resume(
            request, tenant.principal, self._stream_interval, self.served, self.scheduler.requests
        )

    async def cancel(self, request_id: str, tenant: Tenant = ANONYMOUS) -> None:
        """End a request of any gateway. RequestError NOT_FOUND if it is not live."""
        validation.check_request_id(request_id)
        # Both are checked: another request of this id may already run.
        was_in_preparation = self._in_preparation.cancel(tenant.principal, request_id)
        was_live = await self.scheduler.requests.cancel(request_id, tenant.principal)
        if not (was_in_preparation or was_live):
            raise failed(
                grpc.StatusCode.NOT_FOUND,
                "UNKNOWN_REQUEST",
                f"no request {request_id!r} is live",
            )


def _add_trace(prepared: PreparedRequest, trace: CallTrace) -> None:
    """Send the context of the call's trace with a request."""
    context, submitted = trace.context, prepared.submission
    submitted.trace_context.traceparent = context.traceparent
    submitted.trace_context.tracestate = context.tracestate
    if trace.is_recorded:
        add_submission(trace, prepared.model.name, submitted)
