"""The FastAPI application: routes, and errors in OpenAI's JSON."""

import importlib.metadata
import re
from dataclasses import replace

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.routing import Match

from gateway_svc.access.authentication import Authentication
from gateway_svc.generation.service import GenerationService
from gateway_svc.generation.tokenization import TokenizationService
from gateway_svc.http.bodies.chat import ChatRequest
from gateway_svc.http.bodies.completion import CompletionRequest
from gateway_svc.http.bodies.message import CountTokensRequest, MessageRequest
from gateway_svc.http.bodies.response import ResponseRequest
from gateway_svc.http.bodies.tokenizer import DetokenizeRequest, TokenizeRequest
from gateway_svc.http.context import RequestContext, chosen_id
from gateway_svc.http.dialects import INTERNAL_ERROR, dialect_of
from gateway_svc.http.errors import CHAT_NAMES, HttpError, to_http
from gateway_svc.http.generations import Generations
from gateway_svc.http.openapi import add_schemas
from gateway_svc.http.routes.generation import GenerationRoutes
from gateway_svc.http.routes.message import NAMES as MESSAGE_NAMES
from gateway_svc.http.routes.message import MessageRoutes
from gateway_svc.http.routes.model import ModelRoutes
from gateway_svc.http.routes.page import PageRoutes
from gateway_svc.http.routes.response import ResponseRoutes
from gateway_svc.http.service_status import ServiceStatus
from gateway_svc.metrics.request_metrics import GatewayMetrics
from quire.service.errors import RequestError, invalid
from quire.service.health import Health

log = structlog.get_logger()

# The client's names of the tokenizer's fields, by path.
_NAMES = {
    "/tokenize": {"text": "prompt", **CHAT_NAMES},
    "/detokenize": {"token_ids": "tokens"},
    "/v1/messages": MESSAGE_NAMES,
    "/v1/messages/count_tokens": MESSAGE_NAMES,
}
_PREFIX = "/v1"
_SLASHES = re.compile("/+")
_BODIES = (
    CompletionRequest,
    ChatRequest,
    ResponseRequest,
    MessageRequest,
    CountTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
)


def make_app(
    service: GenerationService,
    tokenization: TokenizationService,
    metrics: GatewayMetrics,
    health: Health,
    authentication: Authentication,
) -> FastAPI:
    app = FastAPI(title="Quire", version=importlib.metadata.version("quire"), redoc_url=None)
    context = RequestContext(service, authentication)
    generations = Generations(service, metrics)
    registry: CollectorRegistry = metrics.registry
    generation = GenerationRoutes(context, service, generations)
    app.include_router(generation.router())
    app.include_router(ResponseRoutes(context, service, generations).router())
    messages = MessageRoutes(context, tokenization, generations, generation.make_format)
    app.include_router(messages.router())
    app.include_router(ModelRoutes(context, tokenization, health, registry).router())
    app.include_router(PageRoutes(context, ServiceStatus(service.scheduler)).router())
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_error)
    add_schemas(app, _BODIES)
    return app


async def _on_request_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestError)
    failure = to_http(error, _NAMES.get(request.url.path))
    headers = {"www-authenticate": "Bearer"} if failure.status == 401 else {}
    return _response(request, replace(failure, headers={**failure.headers, **headers}))


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    """A parameter of the path or the query."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    invalid_field = invalid(str(first["loc"][-1]), "INVALID_FIELD", first["msg"])
    return _response(request, to_http(invalid_field))


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    """A path or method that does not exist."""
    assert isinstance(error, HTTPException)
    inner = {
        "message": f"{request.method} {request.url.path}: {error.detail}{_meant(request, error)}",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
    return _response(
        request, HttpError(error.status_code, {"error": inner}, dict(error.headers or {}))
    )


def _meant(request: Request, error: HTTPException) -> str:
    """What is wrong with a client's base URL, if it has a path with `/v1` too often or not at
    all, or with a slash too many."""
    path = request.url.path
    if error.status_code != 404:
        return ""
    single = _SLASHES.sub("/", path)
    for meant in (single, f"{_PREFIX}{single}", single.removeprefix(_PREFIX)):
        scope = {**request.scope, "path": meant}
        routes = request.app.routes
        if meant != path and any(one.matches(scope)[0] is not Match.NONE for one in routes):
            return f"; the path is {meant}: check the client's base URL"
    return ""


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    log.error("an HTTP request failed unexpectedly", exc_info=error)
    return _response(request, INTERNAL_ERROR)


def _response(request: Request, error: HttpError) -> JSONResponse:
    """With the id that the client has chosen, as its log may have it: there is no other one yet."""
    dialect = dialect_of(request.url.path)
    headers = {**error.headers, **dialect.id_headers(chosen_id(request))}
    return JSONResponse(dialect.error_body(error), error.status, headers)
