"""Quire: an LLM inference server as three gRPC services, and the library that talks to it.

    from quire import LLM, SamplingParams

`LLM` runs a model in a private local stack or talks to a running one; `Client` and `AsyncClient`
are the same API call by call.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.async_client import AsyncClient
    from quire.client import Client
    from quire.errors import QuireError
    from quire.launcher.errors import LaunchError
    from quire.launcher.stack import LocalStack
    from quire.llm import LLM
    from quire.outputs import (
        CompletionDelta,
        CompletionOutput,
        Logprob,
        Model,
        RequestDelta,
        RequestOutput,
        Usage,
    )
    from quire.sampling import SamplingParams

__all__ = [
    "LLM",
    "AsyncClient",
    "Client",
    "CompletionDelta",
    "CompletionOutput",
    "LaunchError",
    "LocalStack",
    "Logprob",
    "Model",
    "QuireError",
    "RequestDelta",
    "RequestOutput",
    "SamplingParams",
    "Usage",
]

_HOMES = {
    "AsyncClient": "quire.async_client",
    "Client": "quire.client",
    "CompletionDelta": "quire.outputs",
    "CompletionOutput": "quire.outputs",
    "LLM": "quire.llm",
    "LaunchError": "quire.launcher.errors",
    "LocalStack": "quire.launcher.stack",
    "Logprob": "quire.outputs",
    "Model": "quire.outputs",
    "QuireError": "quire.errors",
    "RequestDelta": "quire.outputs",
    "RequestOutput": "quire.outputs",
    "SamplingParams": "quire.sampling",
    "Usage": "quire.outputs",
}


def __getattr__(name: str) -> object:
    """Imports a public name when it is first asked for: the services import `quire.service`
    through this file and need none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
