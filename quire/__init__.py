"""Quire: an LLM inference server of three gRPC services, and its client library.

    from quire import LLM, SamplingParams

`LLM` runs a model in a private local stack or uses a running server. `Client` and `AsyncClient`
are clients of a running server.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.client.async_client import AsyncClient
    from quire.client.client import Client
    from quire.client.conversations import ToolCall
    from quire.client.errors import (
        AlreadyExistsError,
        CancelledError,
        DeadlineExceededError,
        InvalidArgumentError,
        NotFoundError,
        QuireError,
        ResourceExhaustedError,
        UnauthenticatedError,
        UnavailableError,
    )
    from quire.client.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionDelta,
        CompletionOutput,
        Logprob,
        Model,
        RequestDelta,
        RequestOutput,
        ToolCallDelta,
        Usage,
    )
    from quire.client.sampling_params import BeamSearchParams, SamplingParams
    from quire.client.structured_output import StructuredOutput
    from quire.launcher.errors import LaunchError
    from quire.launcher.stack import LocalStack
    from quire.llm import LLM
    from quire.service.tls import TLS

__all__ = [
    "LLM",
    "TLS",
    "AlreadyExistsError",
    "AsyncClient",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CancelledError",
    "Client",
    "CompletionDelta",
    "CompletionOutput",
    "DeadlineExceededError",
    "InvalidArgumentError",
    "LaunchError",
    "LocalStack",
    "Logprob",
    "Model",
    "NotFoundError",
    "QuireError",
    "RequestDelta",
    "RequestOutput",
    "ResourceExhaustedError",
    "SamplingParams",
    "StructuredOutput",
    "ToolCall",
    "ToolCallDelta",
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
]

_MODULES = {
    "quire.client.async_client": ("AsyncClient",),
    "quire.client.client": ("Client",),
    "quire.client.conversations": ("ToolCall",),
    "quire.client.errors": (
        *("QuireError", "AlreadyExistsError", "CancelledError", "DeadlineExceededError"),
        *("InvalidArgumentError", "NotFoundError", "ResourceExhaustedError"),
        *("UnauthenticatedError", "UnavailableError"),
    ),
    "quire.client.outputs": (
        *("BeamSearchOutput", "BeamSearchSequence"),
        *("CompletionDelta", "CompletionOutput", "Logprob", "Model"),
        *("RequestDelta", "RequestOutput", "ToolCallDelta", "Usage"),
    ),
    "quire.client.sampling_params": ("BeamSearchParams", "SamplingParams"),
    "quire.client.structured_output": ("StructuredOutput",),
    "quire.launcher.errors": ("LaunchError",),
    "quire.launcher.stack": ("LocalStack",),
    "quire.llm": ("LLM",),
    "quire.service.tls": ("TLS",),
}


def __getattr__(name: str) -> object:
    """Import public names lazily: services import `quire.service` through this package, and need
    neither the client library nor the launcher."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
