"""Streams of an OpenAI-compatible server under load, from its completions endpoint."""

import ssl
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2
from pydantic import BaseModel, ValidationError

from quire.bench.server import Message, RequestFailed
from quire.bench.workload import BenchRequest

_DONE = "[DONE]"
_TIMEOUT_S = 10.0


class OpenAIServer:
    """Sends prompts as token ids, so that they do not depend on the server's tokenizer."""

    name = "openai"

    def __init__(
        self,
        url: str,
        model: str,
        temperature: float,
        ignore_eos: bool,
        api_key: str | None,
        ca: Path | None = None,
    ) -> None:
        """`url` is the API's base; a URL without a path is extended by `/v1`. `ignore_eos` sets two
        fields of vLLM, `ignore_eos` and `return_token_ids`, which other servers may refuse.
        `ca` has the authorities that `https://` is verified by; None: public ones."""
        self._client = _client(url, api_key, ca)
        self._shared: dict[str, Any] = {
            "model": model,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ignore_eos:
            self._shared |= {"ignore_eos": True, "return_token_ids": True}

    async def stream(self, request: BenchRequest) -> AsyncGenerator[Message, None]:
        body = {
            **self._shared,
            "prompt": request.prompt_token_ids,
            "max_tokens": request.max_tokens,
        }
        try:
            async with self._client.sse("completions", method="POST", json=body) as events:
                await _check(events.response)
                async for event in events:
                    if event.data == _DONE:
                        return
                    yield message_of(event.data)
        except (httpx2.HTTPError, ValueError) as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
        raise RequestFailed(f"the stream ended without {_DONE}")

    async def decode_counts(self) -> None:
        """OpenAI's API has none."""

    async def close(self) -> None:
        await self._client.aclose()


def served_model(url: str, api_key: str | None, ca: Path | None = None) -> str:
    """The first model that the server lists. ValueError if the response is invalid."""
    try:
        response = httpx2.get(
            f"{_base(url)}/models",
            headers=_headers(api_key),
            timeout=_TIMEOUT_S,
            trust_env=False,
            verify=_verify(ca),
        )
        return str(response.raise_for_status().json()["data"][0]["id"])
    except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"no OpenAI-compatible server at {url}: {error}") from error


class _Choice(BaseModel):
    text: str | None = None
    token_ids: list[int] | None = None


class _Usage(BaseModel):
    completion_tokens: int | None = None


class _Chunk(BaseModel):
    """The fields of a stream's chunk that are used."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: object = None


def message_of(data: str) -> Message:
    """Convert a chunk of a stream. RequestFailed if it is an error or invalid."""
    try:
        chunk = _Chunk.model_validate_json(data)
    except ValidationError as error:
        raise RequestFailed(f"invalid chunk of completions: {data:.80}") from error
    if chunk.error is not None:
        cause = chunk.error
        raise RequestFailed(str(cause.get("message", cause) if isinstance(cause, dict) else cause))
    counted = None if chunk.usage is None else chunk.usage.completion_tokens
    if not chunk.choices:
        return Message(0, num_counted_tokens=counted)
    choice = chunk.choices[0]
    if choice.token_ids is None:
        # Servers send one chunk per token. The final count corrects deviations.
        return Message(int(bool(choice.text)), num_counted_tokens=counted)
    return Message(len(choice.token_ids), choice.token_ids, counted)


def _client(url: str, api_key: str | None, ca: Path | None) -> httpx2.AsyncClient:
    """A client without limits of connections or time and without a proxy: they would distort
    the measurement."""
    return httpx2.AsyncClient(
        base_url=_base(url),
        headers=_headers(api_key),
        timeout=None,
        limits=httpx2.Limits(max_connections=None),
        trust_env=False,
        verify=_verify(ca),
    )


def _verify(ca: Path | None) -> ssl.SSLContext | bool:
    return True if ca is None else ssl.create_default_context(cafile=ca)


def _base(url: str) -> str:
    """Add `/v1` to a URL without a path."""
    parsed = httpx2.URL(url)
    return url.rstrip("/") if parsed.path.strip("/") else f"{url.rstrip('/')}/v1"


def _headers(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


async def _check(response: httpx2.Response) -> None:
    """RequestFailed, with the response's body, unless the status is a success."""
    if response.is_success:
        return
    body = (await response.aread()).decode(errors="replace")
    raise RequestFailed(f"HTTP {response.status_code}: {body:.200}")
