"""Serves the model with llama.cpp's server."""

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2

from benchmarks.engines.child import job
from benchmarks.engines.http_servers import http_server
from benchmarks.engines.types.serving import Prompt, serve_engine

_TIMEOUT_S = 600.0
_DATA = "data: "
# The server closes connections that are idle while other systems are measured.
_NEW_CONNECTIONS = httpx2.Limits(max_keepalive_connections=0)


class LlamaServer:
    def __init__(self, client: httpx2.Client) -> None:
        self._client = client

    def run(self, prompts: Sequence[Prompt], num_outputs: int) -> list[int]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self._written(prompt, num_outputs), prompts))

    def _written(self, prompt: Prompt, num_outputs: int) -> int:
        response = self._client.post("/completion", json=_body(prompt, num_outputs))
        return int(response.raise_for_status().json()["tokens_predicted"])

    def stream(self, prompt: Prompt, num_outputs: int) -> Iterator[int]:
        body = {**_body(prompt, num_outputs), "stream": True, "timings_per_token": True}
        with self._client.stream("POST", "/completion", json=body) as response:
            response.raise_for_status()
            yield from new_tokens(response.iter_lines())


def new_tokens(lines: Iterable[str]) -> Iterator[int]:
    """Yield the number of new tokens of each message. Tokens whose text ends within a character
    come with a later message."""
    num_written = 0
    for line in lines:
        if line.startswith(_DATA):
            timings = json.loads(line.removeprefix(_DATA)).get("timings") or {}
            if count := timings.get("predicted_n", num_written) - num_written:
                num_written += count
                yield count


def _body(prompt: Prompt, num_outputs: int) -> dict[str, object]:
    return {
        "prompt": prompt,
        "n_predict": num_outputs,
        "temperature": 0.0,
        "ignore_eos": True,
        "cache_prompt": False,
    }


def main() -> None:
    given = job()
    with (
        http_server(given["command"], Path(given["log"])) as url,
        httpx2.Client(
            base_url=url, timeout=_TIMEOUT_S, trust_env=False, limits=_NEW_CONNECTIONS
        ) as client,
    ):
        serve_engine(LlamaServer(client), given)


if __name__ == "__main__":
    main()
