"""Routes of the model and of the gateway itself: models, tokenizer, health, version, metrics."""

import importlib.metadata
import time
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from gateway_svc.generation.tokenization import TokenizationService
from gateway_svc.http.bodies.tokenizer import DetokenizeRequest, TokenizeRequest
from gateway_svc.http.context import RequestContext
from gateway_svc.http.openapi import documented
from gateway_svc.http.routes.read_route import ReadRoute
from quire.service.health import Health
from quire.v1 import model_pb2

# Clients read these, whether the model has them or not.
_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token")


class ModelRoutes:
    def __init__(
        self,
        context: RequestContext,
        tokenization: TokenizationService,
        health: Health,
        registry: CollectorRegistry,
    ) -> None:
        self._context = context
        self._tokenization = tokenization
        self._health = health
        self._registry = registry
        self._created = int(time.time())

    def router(self) -> APIRouter:
        router = APIRouter(route_class=ReadRoute)
        router.get("/v1/models", tags=["models"])(self.list_models)
        # A hub id has a slash.
        router.get("/v1/models/{name:path}", tags=["models"])(self.get_model)
        router.post("/tokenize", openapi_extra=documented(TokenizeRequest), tags=["tokenizer"])(
            self.tokenize
        )
        router.post("/detokenize", openapi_extra=documented(DetokenizeRequest), tags=["tokenizer"])(
            self.detokenize
        )
        router.get("/tokenizer_info", tags=["tokenizer"])(self.tokenizer_info)
        router.get("/health", tags=["operations"])(self.health)
        router.get("/ready", tags=["operations"])(self.ready)
        router.get("/version", tags=["operations"])(self.version)
        router.get("/metrics", tags=["operations"])(self.metrics)
        return router

    async def list_models(self, request: Request) -> dict[str, Any]:
        """List the served model."""
        self._context.tenant(request)
        model = self._describe(self._tokenization.model(None))
        pages = {"has_more": False, "first_id": model["id"], "last_id": model["id"]}
        return {"object": "list", "data": [model], **pages}

    async def get_model(self, name: str, request: Request) -> dict[str, Any]:
        """Describe the served model."""
        self._context.tenant(request)
        return self._describe(self._tokenization.model(name))

    async def tokenize(self, request: Request) -> dict[str, Any]:
        """Convert a text or a conversation to tokens."""
        self._context.tenant(request)
        body, message = await self._context.body(request, TokenizeRequest, TokenizeRequest.message)
        response = await self._tokenization.tokenize(message)
        tokens = list(response.token_ids)
        texts = self._tokenization.token_texts(tokens) if body.return_token_strs else None
        return {
            "count": len(tokens),
            "max_model_len": self._tokenization.model(None).max_model_len,
            "tokens": tokens,
            "token_strs": texts,
        }

    async def detokenize(self, request: Request) -> dict[str, Any]:
        """Convert tokens to text."""
        self._context.tenant(request)
        _, message = await self._context.body(request, DetokenizeRequest, DetokenizeRequest.message)
        response = await self._tokenization.detokenize(message)
        return {"prompt": response.text}

    async def tokenizer_info(self, request: Request) -> dict[str, Any]:
        """Return the special tokens by name, the tokenizer's class, and the chat template."""
        self._context.tenant(request)
        files = self._tokenization.files()
        return {
            **dict.fromkeys(_TOKEN_NAMES),
            **files.named_tokens,
            "tokenizer_class": files.tokenizer_class,
            "chat_template": None if files.chat_template is None else files.chat_template.source,
        }

    async def health(self) -> dict[str, Any]:
        """Report that the gateway is alive."""
        return {"status": "alive"}

    async def ready(self) -> Response:
        """Report whether requests can be served, with 503 and the reasons if they cannot."""
        failing = self._health.failing
        content = {"status": "not ready" if failing else "ready", "failing": failing}
        return JSONResponse(content, status_code=503 if failing else 200)

    async def version(self) -> dict[str, Any]:
        """Return the version of Quire."""
        return {"version": importlib.metadata.version("quire")}

    async def metrics(self, request: Request) -> Response:
        """Return the gateway's metrics in Prometheus' text format."""
        self._context.check_admin(request)
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    def _describe(self, model: model_pb2.Model) -> dict[str, Any]:
        """OpenAI's fields, vLLM's length, and Anthropic's fields."""
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "quire",
            "max_model_len": model.max_model_len,
            "type": "model",
            "display_name": model.name,
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat(),
        }
