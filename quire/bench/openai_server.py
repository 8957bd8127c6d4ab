"""Streams of an OpenAI-compatible server under load, by its completions endpoint."""

from collections.abc import AsyncGenerator
from typing import Any

import httpx2
from pydantic import BaseModel, ValidationError

from quire.bench.server import Message, RequestFailed
from quire.bench.workload import BenchRequest

_DONE = "[DONE]"
_TIMEOUT_S = 10.0


class OpenAIServer:
    """Asks with token ids, which the completions endpoint takes since the beginning: each server
    gets the same tokens, whatever its tokenizer."""

    name = "openai"

    def __init__(
        self, url: str, model: str, temperature: float, ignore_eos: bool, api_key: str | None
    ) -> None:
        """`url` is the server's, or the API's base, which is its `/v1` if it does not say. With
        `ignore_eos` requests have two fields of vLLM's, to go on past ends of sequence and to tell
        token ids; servers that know neither may refuse them."""
        self._client = _client(url, api_key)
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

    async def close(self) -> None:
        await self._client.aclose()


def served_model(url: str, api_key: str | None) -> str:
    """The first model that the server lists. ValueError if it does not answer as it should."""
    try:
        response = httpx2.get(
            f"{_base(url)}/models", headers=_headers(api_key), timeout=_TIMEOUT_S, trust_env=False
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
    """Of a stream; what else it has is of no concern."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: object = None


def message_of(data: str) -> Message:
    """A message from a chunk of a stream. RequestFailed if that is an error, or no chunk."""
    try:
        chunk = _Chunk.model_validate_json(data)
    except ValidationError as error:
        raise RequestFailed(f"no chunk of completions: {data:.80}") from error
    if chunk.error is not None:
        said = chunk.error
        raise RequestFailed(str(said.get("message", said) if isinstance(said, dict) else said))
    counted = None if chunk.usage is None else chunk.usage.completion_tokens
    if not chunk.choices:
        return Message(0, num_counted_tokens=counted)
    choice = chunk.choices[0]
    if choice.token_ids is None:
        # Servers send a chunk per token; the count at the end says the rest.
        return Message(int(bool(choice.text)), num_counted_tokens=counted)
    return Message(len(choice.token_ids), choice.token_ids, counted)


def _client(url: str, api_key: str | None) -> httpx2.AsyncClient:
    """Without a limit of connections or of time, and past any proxy: these would be measured."""
    return httpx2.AsyncClient(
        base_url=_base(url),
        headers=_headers(api_key),
        timeout=None,
        limits=httpx2.Limits(max_connections=None),
        trust_env=False,
    )


def _base(url: str) -> str:
    """With the `/v1` that most people leave out when they name a server."""
    parsed = httpx2.URL(url)
    return url.rstrip("/") if parsed.path.strip("/") else f"{url.rstrip('/')}/v1"


def _headers(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


async def _check(response: httpx2.Response) -> None:
    """RequestFailed, with what the server says, unless the status is a good one."""
    if response.is_success:
        return
    said = (await response.aread()).decode(errors="replace")
    raise RequestFailed(f"HTTP {response.status_code}: {said:.200}")
