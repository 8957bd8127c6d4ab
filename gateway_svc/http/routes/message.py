"""`/v1/messages`: Anthropic's API."""

import time

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from gateway_svc.generation.tokenization import TokenizationService
from gateway_svc.http.bodies.message import CountTokensRequest, MessageRequest
from gateway_svc.http.bodies.structured import FORMAT_NAMES, OUTPUT_CONFIG_NAMES
from gateway_svc.http.context import RequestContext
from gateway_svc.http.dialects import ANTHROPIC
from gateway_svc.http.event_id import EventId
from gateway_svc.http.generation_response import GenerationResponse
from gateway_svc.http.generations import Generations
from gateway_svc.http.openapi import documented
from gateway_svc.http.output import MakeFormat, write_events, write_object
from gateway_svc.http.response_writer import ResponseWriter
from quire.internal.v1 import gateway_pb2

# The client's names of fields.
NAMES = {
    "conversation": "messages",
    "continue_final_message": "the assistant's message at the end of messages",
    "tools[].parameters": "tools[].input_schema",
    "stop": "stop_sequences",
    "request_id": "X-Request-Id",
    **OUTPUT_CONFIG_NAMES,
}


class MessageRoutes:
    """Adapts messages to generations."""

    def __init__(
        self,
        context: RequestContext,
        tokenization: TokenizationService,
        generations: Generations,
        make_format: MakeFormat,
    ) -> None:
        """`make_format` is that of any request: the id may be one of another API."""
        self._context = context
        self._make_format = make_format
        self._tokenization = tokenization
        self._generations = generations

    def router(self) -> APIRouter:
        router = APIRouter(default_response_class=Response, tags=["messages"])
        router.post("/v1/messages", openapi_extra=documented(MessageRequest))(self.create)
        router.post("/v1/messages/count_tokens", openapi_extra=documented(CountTokensRequest))(
            self.count_tokens
        )
        return router

    async def create(self, request: Request) -> Response:
        """Generate a message, streamed or whole."""
        tenant = self._context.tenant(request)
        request_id = self._context.request_id(request)
        body, message = await self._context.body(
            request, MessageRequest, lambda body: body.message(request_id)
        )
        state = gateway_pb2.HttpState(
            format=gateway_pb2.FORMAT_MESSAGE,
            created=int(time.time()),
            num_prompts=1,
            format_field=body.format_field,
        )
        has_client_id = self._context.has_request_id(request)

        async def run(writer: ResponseWriter) -> None:
            updates = self._generations.run([message], [state], tenant, has_client_id)
            if body.stream:
                await write_events(updates, self._make_format, EventId(), writer)
            else:
                await write_object(updates, self._make_format, writer)

        names = {**NAMES, **FORMAT_NAMES[body.format_field]}
        return GenerationResponse(request_id, run, names, ANTHROPIC)

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a prompt."""
        self._context.tenant(request)
        _, message = await self._context.body(
            request, CountTokensRequest, CountTokensRequest.to_tokenize
        )
        response = await self._tokenization.tokenize(message)
        return JSONResponse({"input_tokens": len(response.token_ids)})
