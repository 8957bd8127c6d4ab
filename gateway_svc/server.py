"""Lifecycle of a gateway: start, serve, drain, stop."""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

import structlog

from gateway_svc.access.authentication import Authentication
from gateway_svc.access.keys_watch import KeysWatch
from gateway_svc.admission.live_limits import LiveLimits, stopping
from gateway_svc.admission.request_size import RequestSize
from gateway_svc.generation.service import GenerationService
from gateway_svc.generation.tokenization import TokenizationService
from gateway_svc.http.app import make_app
from gateway_svc.http.server import HttpServer
from gateway_svc.metrics.request_metrics import GatewayMetrics
from gateway_svc.output_formats.formats import choose
from gateway_svc.rpc.beam_search_servicer import BeamSearchServicer
from gateway_svc.rpc.call_interceptor import CallInterceptor
from gateway_svc.rpc.inference_servicer import InferenceServicer
from gateway_svc.rpc.model_servicers import ModelServicer, TokenizerServicer
from gateway_svc.scheduler.shards import Shards
from gateway_svc.scheduler.suspension import Suspension
from gateway_svc.settings import GatewaySettings
from gateway_svc.text import model_files
from gateway_svc.text.model_files import ModelFilesError
from gateway_svc.text.served_model import Model, ServedModel
from gateway_svc.tracing.call_trace import CallTracing
from quire.service.addresses import is_loopback
from quire.service.channels import (
    PUBLIC_MESSAGE_BYTES,
)
from quire.service.health import Health
from quire.service.http2.limits import Limits
from quire.service.http2.server import Server
from quire.service.lifecycle import Signals, start_server
from quire.service.memory import free_memory_regularly, keep_heap_compact
from quire.service.metrics.server import MetricsServer, export_expiry, export_process, start_metrics
from quire.v1 import beam_search_pb2_grpc, inference_pb2_grpc, model_pb2_grpc, tokenizer_pb2_grpc

log = structlog.get_logger()

SERVICES = (
    "quire.v1.InferenceService",
    "quire.v1.BeamSearchService",
    "quire.v1.TokenizerService",
    "quire.v1.ModelService",
)
_TOKENIZER = "tokenizer"
_SCHEDULER = "scheduler"
# Sequence length that requests are limited by before the model is loaded.
_UNKNOWN_MODEL_LEN = 2**20
# If the model takes longer to load, as one that is downloaded, the server starts before.
_MODEL_WAIT_S = 5.0
# A stopping gateway serves calls that were at its socket until none has begun for this time.
_QUIET_S = 0.25
# Of one client at once; `--max-live-requests` and the like are lower.
_MAX_CALLS = 100_000
_MAX_QUIET_PERIODS = 8


class Gateway:
    """The components of one gateway."""

    def __init__(self, settings: GatewaySettings) -> None:
        """KeysFileError if the settings' keys file is not valid."""
        self._keys_watch = None if settings.api_keys is None else KeysWatch(settings.api_keys)
        self.authentication = (
            Authentication() if self._keys_watch is None else self._keys_watch.authentication
        )
        self.health = Health((_TOKENIZER, _SCHEDULER), SERVICES)
        self._metrics = GatewayMetrics(settings.objectives)
        self.live_limits = LiveLimits(
            settings.max_live_calls, settings.max_request_bytes, self._metrics.call_refused
        )
        self._spans = settings.span_exporter("gateway")
        self._tracing = CallTracing(self._spans, settings.trace_sampling_ratio)
        self.calls = CallInterceptor(
            SERVICES, self.authentication, self.live_limits, self.request_size, self._tracing
        )
        # None before the start, and if metrics are not configured.
        self.metrics_server: MetricsServer | None = None
        # Why the scheduler cannot be used, or None. A task publishes it, after the connections.
        self._scheduler_states = asyncio.Queue[str | None]()
        self._suspension = Suspension()
        self.scheduler = Shards(
            settings.scheduler_addresses,
            settings.max_queued_tokens,
            settings.scheduler_wait_s,
            self._scheduler_states.put_nowait,
            self._metrics.routing,
            settings.scheduler_tls,
            self._suspension.has_just_ended,
        )
        self.served = ServedModel(settings.served_model_name or settings.model)
        self.generations = GenerationService(
            self.served,
            self.scheduler,
            settings.max_resume_window_s,
            settings.background_window_s,
            settings.stream_interval,
        )
        self.tokenization = TokenizationService(self.served, self.scheduler)
        # None if it is not configured.
        self.http = self._make_http(settings)
        # Created at the start, as its limit of a message's size cannot change.
        self._server: Server | None = None
        self._settings = settings
        self._threads = ThreadPoolExecutor(settings.tokenizer_threads, "tokenizer")
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> str:
        """Load the model, or start to, bind, and start to connect; return the bound address."""
        settings = self._settings
        reading = asyncio.get_running_loop().run_in_executor(
            self._threads, self._read_model, settings.model, settings.revision
        )
        await asyncio.wait({reading}, timeout=_MODEL_WAIT_S)
        self._server = self._make_server(_max_message_bytes(reading))
        certificates = settings.server_certificates("h2")
        export_process(self._metrics.registry)
        export_expiry(self._metrics.registry, certificates)
        if settings.metrics_listen is not None:
            self.metrics_server = await start_metrics(
                settings.metrics_listen, self._metrics.registry
            )
        address = await start_server(
            self._server,
            settings.listen,
            SERVICES,
            self.health,
            settings.address_file,
            certificates,
            settings.health_listen,
        )
        self._tasks = [
            asyncio.create_task(self._set_model(reading)),
            asyncio.create_task(self._publish_scheduler_state()),
            asyncio.create_task(self._suspension.run()),
        ]
        if self._keys_watch is not None:
            self._tasks.append(asyncio.create_task(self._keys_watch.run()))
        else:
            _warn_of_open_addresses(settings.listen, settings.http_listen)
        self.scheduler.start()
        if self.http is not None:
            await self.http.start(settings.http_address_file)
        return address

    def request_size(self) -> RequestSize:
        """The limits of a request, which follow from the model once it is loaded."""
        if not self.served.is_set:
            return RequestSize(PUBLIC_MESSAGE_BYTES, _UNKNOWN_MODEL_LEN)
        limits = self.served.get(None).limits(self.scheduler.max_model_len)
        return RequestSize.of_context(
            limits.max_model_len, limits.longest_token, PUBLIC_MESSAGE_BYTES
        )

    async def drain(self) -> None:
        """Refuse new calls with UNAVAILABLE and wait until the live ones have ended.

        The server goes on accepting: if it were stopped, calls that have reached the socket would
        end without a reason.
        """
        self.live_limits.is_stopping = True
        await self.health.stopping()
        for _ in range(_MAX_QUIET_PERIODS):
            await self._wait_until_idle()
            num_attempts = self.live_limits.num_attempts
            await asyncio.sleep(_QUIET_S)
            if self.live_limits.num_attempts == num_attempts:
                break
        await self._wait_until_idle()

    async def _wait_until_idle(self) -> None:
        """Wait until no call and no HTTP request is live."""
        await self.calls.wait_until_idle()
        if self.http is not None:
            await self.http.requests.wait_until_idle()

    async def stop(self) -> None:
        """End live calls with UNAVAILABLE, then all components. The requests of these calls
        continue for a grace period, in which they can be resumed at another gateway.
        """
        self.live_limits.is_stopping = True
        self.scheduler.detach_all(stopping())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await self._wait_until_idle()
        if self.http is not None:
            await self.http.stop()
        if self._server is not None:
            await self._server.stop(None)
        await self.health.close()
        await self.scheduler.close(timeout_s=1)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self.metrics_server is not None:
            await self.metrics_server.stop()
        if self._spans is not None:
            await self._spans.close()

    def _make_server(self, max_message_bytes: int) -> Server:
        settings = self._settings
        limits = Limits(
            max_message_bytes,
            _MAX_CALLS,
            settings.max_connection_age_s,
            max_unread_bytes=settings.max_request_bytes,
            max_waiting_calls=settings.max_live_calls,
        )
        server = Server(limits, interceptor=self.calls)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(
            InferenceServicer(self.generations, self._metrics, self.calls.tenant_of), server
        )
        beam_search_pb2_grpc.add_BeamSearchServiceServicer_to_server(
            BeamSearchServicer(self.generations, self._metrics, self.calls.tenant_of), server
        )
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(
            TokenizerServicer(self.tokenization), server
        )
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(self.tokenization), server)
        return server

    def _make_http(self, settings: GatewaySettings) -> HttpServer | None:
        if settings.http_listen is None:
            return None
        app = make_app(
            self.generations,
            self.tokenization,
            self._metrics,
            self.health,
            self.authentication,
        )
        return HttpServer(
            app,
            settings.http_listen,
            self.live_limits,
            self.authentication,
            settings.server_certificates(),
            self._tracing,
            settings.max_connection_age_s,
            settings.allowed_origins,
        )

    async def _set_model(self, reading: "asyncio.Future[Model]") -> None:
        try:
            model = await reading
        except Exception as error:
            # Memory or a thread that the system refuses, or a defect, whose traceback is needed.
            reason = str(error) or type(error).__name__
            is_known = isinstance(error, ModelFilesError)
            log.error("the model cannot be served", reason=reason, exc_info=not is_known)
            await self.health.failed(_TOKENIZER, reason)
            return
        self.served.set(model)
        log.info(
            "model loaded",
            model=model.name,
            vocab_size=model.files.vocab_size,
            tool_format=model.formats.tools,
            reasoning_format=model.formats.reasoning,
        )
        await self.health.passed(_TOKENIZER)

    def _read_model(self, model: str, revision: str | None) -> Model:
        files = model_files.load(model, revision)
        formats = choose(
            files.template_source,
            self._settings.tool_call_parser,
            self._settings.reasoning_parser,
        )
        return Model.from_files(self.served.name, files, self._threads, formats)

    async def _publish_scheduler_state(self) -> None:
        while True:
            reason = await self._scheduler_states.get()
            if reason is None:
                await self.health.passed(_SCHEDULER)
            else:
                await self.health.failed(_SCHEDULER, reason)


def _max_message_bytes(reading: "asyncio.Future[Model]") -> int:
    """The size from which the server refuses messages by their length: that of a model that is
    loaded, with a margin."""
    if not reading.done() or reading.exception() is not None:
        return PUBLIC_MESSAGE_BYTES
    limits = reading.result().limits(None)
    size = RequestSize.of_context(limits.max_model_len, limits.longest_token, PUBLIC_MESSAGE_BYTES)
    return size.max_message_bytes(PUBLIC_MESSAGE_BYTES)


def _warn_of_open_addresses(*listens: str | None) -> None:
    for listen in listens:
        if listen is not None and not is_loopback(listen):
            log.warning("calls need no API key, and other machines can connect", address=listen)


async def serve(settings: GatewaySettings) -> None:
    """Run a gateway until a signal. OSError if the address cannot be bound."""
    signals = Signals()
    signals.install()
    keep_heap_compact()
    gateway = Gateway(settings)
    freeing = asyncio.create_task(free_memory_regularly(lambda: not gateway.live_limits.num_calls))
    try:
        await gateway.start()
        await signals.drain.wait()
        log.info("draining", live_calls=gateway.calls.num_live)
        await signals.drain_within(gateway.drain, settings.drain_grace_s)
    finally:
        freeing.cancel()
        await gateway.stop()
    log.info("stopped")
