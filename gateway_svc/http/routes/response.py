"""`/v1/responses`: creates, retrieves and cancels responses."""

import asyncio
import contextlib
import time
from contextlib import aclosing
from typing import Annotated, Any

import grpc
import orjson
from fastapi import APIRouter, HTTPException, Query, Request, Response

from gateway_svc.access.tenant import Tenant
from gateway_svc.generation.generation import Generation
from gateway_svc.generation.service import GenerationService
from gateway_svc.http.bodies.response import ResponseRequest
from gateway_svc.http.bodies.structured import TEXT_FORMAT_NAMES
from gateway_svc.http.context import RequestContext
from gateway_svc.http.event_id import DONE, EventId
from gateway_svc.http.formats.response import ResponseFormat, ended_events, ended_response
from gateway_svc.http.generation_response import GenerationResponse
from gateway_svc.http.generations import Generations, PromptUpdate, Updates
from gateway_svc.http.openapi import documented
from gateway_svc.http.output import Collector, write_events, write_object
from gateway_svc.http.response_writer import ResponseWriter
from gateway_svc.scheduler.events import EndedError
from quire.internal.v1 import gateway_pb2
from quire.service.errors import RequestError, failed

# A response in the background that takes longer than this to read is still running.
_READ_S = 0.5
# Of a request whose other readers take it over each time before it is read.
_MAX_ATTACHMENTS = 5
_TAKEN_OVER = "TAKEN_OVER"
_PREFIX = "resp_"
_MAX_SEQUENCE_NUMBER = 2**31 - 1
_NAMES = {
    "conversation": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "request_id": "X-Request-Id",
    **TEXT_FORMAT_NAMES,
}


class _TakenOverError(RequestError):
    """Another reader has taken a request over, which runs on."""


class ResponseRoutes:
    """Adapts responses to generations. A response is kept as long as its request's record."""

    def __init__(
        self, context: RequestContext, service: GenerationService, generations: Generations
    ) -> None:
        self._context = context
        self._service = service
        self._generations = generations

    def router(self) -> APIRouter:
        router = APIRouter(default_response_class=Response, tags=["responses"])
        router.post("/v1/responses", openapi_extra=documented(ResponseRequest))(self.create)
        # An id may have slashes, but this is a path of OpenAI's that is not served.
        router.get("/v1/responses/{response_id:path}/input_items", include_in_schema=False)(_absent)
        router.get("/v1/responses/{response_id:path}")(self.retrieve)
        router.post("/v1/responses/{response_id:path}/cancel")(self.cancel)
        return router

    async def create(self, request: Request) -> Response:
        """Generate a response, streamed, whole, or in the background."""
        tenant = self._context.tenant(request)
        request_id = self._context.request_id(request)
        name = self._service.served.name
        body, (message, response) = await self._context.body(
            request,
            ResponseRequest,
            lambda body: (body.message(request_id), orjson.dumps(body.response(name))),
        )
        state = gateway_pb2.HttpState(
            format=gateway_pb2.FORMAT_RESPONSE,
            created=int(time.time()),
            num_prompts=1,
            response=response,
            background=bool(body.background),
            format_field="text",
            drop_exchanges=body.truncation == "auto",
        )
        updates = self._generations.run(
            [message], [state], tenant, self._context.has_request_id(request)
        )

        async def run(writer: ResponseWriter) -> None:
            if body.stream:
                await write_events(updates, self._format_of, EventId(), writer)
            elif body.background:
                # The request continues after the end of this call.
                async with aclosing(updates):
                    update = await anext(updates)
                await writer.json(200, self._format(update.generation).queued())
            else:
                await write_object(updates, self._format_of, writer)

        return GenerationResponse(request_id, run, _NAMES)

    async def retrieve(
        self,
        response_id: str,
        request: Request,
        stream: bool = False,
        starting_after: Annotated[int, Query(ge=-1, le=_MAX_SEQUENCE_NUMBER)] = -1,
    ) -> Response:
        """Return a response, or stream its events after a sequence number. One that runs in the
        background is returned as far as it is; the stream of another one that runs is taken over.
        """
        tenant = self._context.tenant(request)
        request_id = _request_id(response_id)

        async def run(writer: ResponseWriter) -> None:
            if not stream:
                await writer.json(200, await self._object(request_id, tenant))
                return
            try:
                await self._write_events(request_id, tenant, starting_after, writer)
            except EndedError as error:
                if writer.has_started:
                    raise
                body = _ended_object(request_id, error)
                await writer.start()
                await writer.events(ended_events(body, starting_after), DONE)
                await writer.end(DONE)

        return GenerationResponse(request_id, run)

    async def cancel(self, response_id: str, request: Request) -> Response:
        """End a live response. One that has ended is returned as it is."""
        tenant = self._context.tenant(request)
        request_id = _request_id(response_id)

        async def run(writer: ResponseWriter) -> None:
            try:
                body = await self._cancelled(request_id, tenant)
            except RequestError as error:
                if error.info.reason != "UNKNOWN_REQUEST":
                    raise
                body = await self._object(request_id, tenant)
            await writer.json(200, body)

        return GenerationResponse(request_id, run)

    async def _cancelled(self, request_id: str, tenant: Tenant) -> dict[str, Any]:
        """Cancel a response. RequestError UNKNOWN_REQUEST if it is not live."""
        try:
            async with aclosing(self._updates(request_id, tenant)) as updates:
                form = self._format((await anext(updates)).generation)
                await self._service.cancel(request_id, tenant)
        except EndedError as error:
            return _ended_object(request_id, error)
        return form.cancelled()

    async def _object(self, request_id: str, tenant: Tenant) -> dict[str, Any]:
        try:
            return await self._output(request_id, tenant)
        except EndedError as error:
            return _ended_object(request_id, error)

    async def _output(self, request_id: str, tenant: Tenant) -> dict[str, Any]:
        """The object of a response that runs or has finished. One that another reader takes over
        still runs, and is returned as far as it was read. EndedError if it has failed."""
        collector = Collector(self._format_of)
        async with aclosing(self._updates(request_id, tenant)) as updates:
            first = await anext(updates)
            collector.add(first)
            state = first.generation.state
            is_background = state is not None and state.http.background
            with contextlib.suppress(TimeoutError, _TakenOverError):
                async with asyncio.timeout(_READ_S if is_background else None):
                    async for update in updates:
                        collector.add(update)
        return collector.body()

    async def _updates(self, request_id: str, tenant: Tenant) -> Updates:
        """Yield the updates of a request, attached again if another reader takes it over before
        the first one. _TakenOverError after that."""
        has_begun = False
        for number in range(1, _MAX_ATTACHMENTS + 1):
            updates = self._generations.resume(request_id, EventId(), tenant)
            try:
                async with aclosing(updates):
                    async for update in updates:
                        has_begun = True
                        yield update
                return
            except RequestError as error:
                if error.info.reason != _TAKEN_OVER:
                    raise
                if has_begun or number == _MAX_ATTACHMENTS:
                    raise _TakenOverError(error.code, error.message, error.details) from error

    async def _write_events(
        self, request_id: str, tenant: Tenant, after: int, writer: ResponseWriter
    ) -> None:
        """Write the events after a sequence number."""

        def make_format(update: PromptUpdate) -> ResponseFormat:
            return self._format(update.generation, after)

        updates = self._generations.resume(request_id, EventId(), tenant)
        await write_events(updates, make_format, EventId(), writer)

    def _format_of(self, update: PromptUpdate) -> ResponseFormat:
        return self._format(update.generation)

    def _format(self, generation: Generation, after: int = -1) -> ResponseFormat:
        """RequestError NOT_FOUND if the request was not created as a response."""
        state = generation.state
        if state is None or state.http.format != gateway_pb2.FORMAT_RESPONSE:
            raise _unknown(_PREFIX + generation.request_id)
        model = self._service.served.get(state.model)
        return ResponseFormat(generation, model, state.http, after)


def _ended_object(request_id: str, error: EndedError) -> dict[str, Any]:
    """The object of a response that has ended with an error."""
    state = gateway_pb2.ResumeState.FromString(error.opaque)
    if state.http.format != gateway_pb2.FORMAT_RESPONSE:
        raise _unknown(_PREFIX + request_id)
    return ended_response(request_id, state.http, error)


async def _absent() -> None:
    raise HTTPException(404)


def _request_id(response_id: str) -> str:
    if not response_id.startswith(_PREFIX):
        raise _unknown(response_id)
    return response_id.removeprefix(_PREFIX)


def _unknown(response_id: str) -> RequestError:
    return failed(
        grpc.StatusCode.NOT_FOUND, "UNKNOWN_RESPONSE", f"no response {response_id[:256]!r} is kept"
    )
