"""What all routes need of a request: its id, its tenant, and its body."""

import secrets
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request

from gateway_svc.access.authentication import Authentication, authorization
from gateway_svc.access.tenant import Tenant
from gateway_svc.generation.service import GenerationService
from gateway_svc.http.bodies.fields import HttpRequest
from gateway_svc.http.bodies.reading import read_body

R = TypeVar("R", bound=HttpRequest)
T = TypeVar("T")

# Escapes such as \u00e9 take six bytes for a character.
_BYTES_PER_CHARACTER = 6
_MIN_BODY_BYTES = 2**20
# JSON of this size is parsed within 100 ms, unless it is made of tiny nested lists (a second).
_MAX_BODY_BYTES = 2**23


class RequestContext:
    """Reads requests of one gateway."""

    def __init__(self, service: GenerationService, authentication: Authentication) -> None:
        self._service = service
        self._authentication = authentication

    def tenant(self, request: Request) -> Tenant:
        """RequestError UNAUTHENTICATED without a known key, where keys are needed."""
        return self._authentication.authenticate(authorization(request.headers))

    def check_admin(self, request: Request) -> None:
        """RequestError also for a key whose tenant is not an administrator."""
        self._authentication.authenticate_admin(authorization(request.headers))

    async def body(self, request: Request, kind: type[R], convert: Callable[[R], T]) -> tuple[R, T]:
        """The body, and what it is converted to, in a thread if it is large."""
        return await read_body(request, kind, self._max_body_bytes(), convert)

    @staticmethod
    def request_id(request: Request) -> str:
        """The client's, or a random one. The Idempotency-Key is the same for each attempt, the
        X-Request-Id of some proxies is not."""
        return chosen_id(request) or secrets.token_hex(16)

    @staticmethod
    def has_request_id(request: Request) -> bool:
        """Whether the client has chosen the id."""
        return bool(chosen_id(request))

    def _max_body_bytes(self) -> int:
        """More than any request that the model's context can hold."""
        model = self._service.served.get(None)
        limits = model.limits(self._service.scheduler.max_model_len)
        characters = limits.max_model_len * limits.longest_token
        return min(max(_MIN_BODY_BYTES, characters * _BYTES_PER_CHARACTER), _MAX_BODY_BYTES)


def chosen_id(request: Request) -> str:
    """The id that the client has chosen for its request; empty without one."""
    names = ("idempotency-key", "x-request-id")
    return next((value for name in names if (value := request.headers.get(name))), "")
