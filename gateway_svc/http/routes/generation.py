"""Routes that generate: completions, chat completions, and the events of any request."""

import time
from dataclasses import replace
from typing import Final

from fastapi import APIRouter, Request, Response

from gateway_svc.access.tenant import Tenant
from gateway_svc.generation.service import GenerationService
from gateway_svc.http.bodies.chat import ChatRequest
from gateway_svc.http.bodies.completion import CompletionRequest
from gateway_svc.http.bodies.fields import GenerationMessage, request_id_of
from gateway_svc.http.bodies.sampling import SamplingFields
from gateway_svc.http.cancellation import cancel_prompts
from gateway_svc.http.context import RequestContext
from gateway_svc.http.dialects import ANTHROPIC
from gateway_svc.http.errors import CHAT_NAMES
from gateway_svc.http.event_id import DONE, EventId
from gateway_svc.http.formats.chat import ChatFormat
from gateway_svc.http.formats.completion import CompletionFormat
from gateway_svc.http.formats.format import Format
from gateway_svc.http.formats.message import MessageFormat
from gateway_svc.http.formats.response import ResponseFormat
from gateway_svc.http.generation_response import GenerationResponse
from gateway_svc.http.generations import Generations, PromptUpdate
from gateway_svc.http.openapi import documented
from gateway_svc.http.output import write_events, write_object
from gateway_svc.http.response_writer import ResponseWriter
from quire.internal.v1 import gateway_pb2
from quire.service.errors import invalid

_REQUEST_ID = "X-Request-Id"
# Of the events of a message by its id: an EventSource reconnects until it has received `done`.
_RESUMED_MESSAGE: Final = replace(ANTHROPIC, has_done=True)


class GenerationRoutes:
    """Adapts HTTP requests to generations, one per prompt."""

    def __init__(
        self, context: RequestContext, service: GenerationService, generations: Generations
    ) -> None:
        self._context = context
        self._service = service
        self._generations = generations

    def router(self) -> APIRouter:
        router = APIRouter(default_response_class=Response)
        router.post(
            "/v1/completions", openapi_extra=documented(CompletionRequest), tags=["generation"]
        )(self.create_completion)
        router.post(
            "/v1/chat/completions", openapi_extra=documented(ChatRequest), tags=["generation"]
        )(self.create_chat_completion)
        router.get("/v1/requests/{request_id:path}/events", tags=["requests"])(self.request_events)
        router.delete("/v1/requests/{request_id:path}", status_code=204, tags=["requests"])(
            self.cancel_request
        )
        return router

    async def create_completion(self, request: Request) -> Response:
        """Complete one or several prompts."""
        tenant = self._context.tenant(request)
        request_id = self._context.request_id(request)
        body, messages = await self._context.body(
            request,
            CompletionRequest,
            lambda body: body.messages(request_id, tenant.limits.output_tokens),
        )
        states = [_state(body, gateway_pb2.FORMAT_COMPLETION, len(messages)) for _ in messages]
        if body.echo:
            await self._set_echoes(body, states)
        elif body.max_tokens == 0:
            raise invalid(
                "max_tokens", "MAX_TOKENS_OUT_OF_RANGE", "is 0; must be at least 1 without echo"
            )
        renamed = {
            "text": "prompt",
            "token_ids": "prompt",
            "request_id": _REQUEST_ID,
            **body.format_names,
        }
        if body.prompt_logprobs is None:
            renamed["prompt_logprobs"] = "logprobs"
        return self._respond(request, request_id, tenant, body, messages, states, renamed)

    async def create_chat_completion(self, request: Request) -> Response:
        """Continue a conversation."""
        tenant = self._context.tenant(request)
        request_id = self._context.request_id(request)
        body, message = await self._context.body(
            request, ChatRequest, lambda body: body.message(request_id)
        )
        states = [_state(body, gateway_pb2.FORMAT_CHAT, 1)]
        renamed = {
            **CHAT_NAMES,
            "request_id": _REQUEST_ID,
            **body.format_names,
        }
        if body.top_logprobs is not None:
            renamed["logprobs"] = "top_logprobs"
        if body.max_completion_tokens is not None:
            renamed["max_tokens"] = "max_completion_tokens"
        return self._respond(request, request_id, tenant, body, [message], states, renamed)

    async def request_events(self, request_id: str, request: Request) -> Response:
        """Stream a request's output, live or finished, after the event that `Last-Event-ID`
        names. A browser's EventSource sends that header when it reconnects."""
        tenant = self._context.tenant(request)
        last_id = request.headers.get("last-event-id", "")
        if last_id == DONE:
            # Makes an EventSource stop.
            return Response(status_code=204)
        event_id = EventId.parse(last_id) if last_id else EventId()

        async def run(writer: ResponseWriter) -> None:
            def make_format(update: PromptUpdate) -> Format:
                form = self.make_format(update)
                if isinstance(form, MessageFormat):
                    writer.use(_RESUMED_MESSAGE)
                return form

            updates = self._generations.resume(request_id, event_id, tenant)
            await write_events(updates, make_format, event_id, writer)

        return GenerationResponse(request_id, run, {"next_token_indices": "Last-Event-ID"})

    async def cancel_request(self, request_id: str, request: Request) -> Response:
        """End a live request with all its prompts."""
        await cancel_prompts(request_id, self._context.tenant(request), self._service)
        return Response(status_code=204)

    def make_format(self, update: PromptUpdate) -> Format:
        """The format in which a request was created; that of completions for one over gRPC."""
        generation = update.generation
        state = generation.state
        assert state is not None
        model = self._service.served.get(state.model)
        http = state.http if state.HasField("http") else gateway_pb2.HttpState(include_usage=True)
        if http.format == gateway_pb2.FORMAT_CHAT:
            return ChatFormat(generation.request_id, model, http)
        if http.format == gateway_pb2.FORMAT_RESPONSE:
            return ResponseFormat(generation, model, http)
        if http.format == gateway_pb2.FORMAT_MESSAGE:
            return MessageFormat(generation, model)
        request_id = request_id_of(generation.request_id, update.prompt)
        return CompletionFormat(request_id, model, http)

    def _respond(
        self,
        request: Request,
        request_id: str,
        tenant: Tenant,
        body: SamplingFields,
        messages: list[GenerationMessage],
        states: list[gateway_pb2.HttpState],
        renamed: dict[str, str],
    ) -> Response:
        if body.stream_options is not None and not body.stream:
            raise invalid("stream_options", "NO_STREAM", "is accepted only with stream = true")

        if body.prompt_logprobs is not None and body.stream:
            raise invalid("prompt_logprobs", "UNSUPPORTED_FIELD", "is not supported in streams")

        has_client_id = self._context.has_request_id(request)

        async def run(writer: ResponseWriter) -> None:
            updates = self._generations.run(messages, states, tenant, has_client_id, body.search)
            if body.stream:
                await write_events(updates, self.make_format, EventId(), writer)
            else:
                await write_object(updates, self.make_format, writer)

        return GenerationResponse(request_id, run, {**renamed, "beam_width": "n"})

    async def _set_echoes(
        self, body: CompletionRequest, states: list[gateway_pb2.HttpState]
    ) -> None:
        model = self._service.served.get(body.model)
        for prompt, state in zip(body.prompts, states, strict=True):
            state.echo = prompt if isinstance(prompt, str) else await model.decode(prompt, False)
            state.echo_logprobs = body.has_echo_logprobs
            state.omit_output = body.max_tokens == 0


def _state(
    body: SamplingFields, form: gateway_pb2.Format.ValueType, num_prompts: int
) -> gateway_pb2.HttpState:
    return gateway_pb2.HttpState(
        format=form,
        created=int(time.time()),
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        return_token_ids=bool(body.return_token_ids),
        ignore_eos=bool(body.ignore_eos),
        return_prompt_logprobs=body.prompt_logprobs is not None,
        format_field=body.format_field,
        num_prompts=num_prompts,
    )
