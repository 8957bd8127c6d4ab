"""A real HTTP server with a completions endpoint that is scripted."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

# Streams of a server with vLLM's extensions, and of one without.
WITH_IDS = [
    {"choices": [{"text": "a", "token_ids": [5]}]},
    {"choices": [{"text": "", "token_ids": [6, 7]}]},
    {"choices": [], "usage": {"completion_tokens": 3}},
]
WITHOUT_IDS = [
    {"choices": [{"text": "a"}]},
    {"choices": [{"text": "bc"}]},
    {"choices": [{"text": "", "finish_reason": "length"}]},
    {"choices": [], "usage": {"completion_tokens": 3}},
]


class Handler(BaseHTTPRequestHandler):
    """Streams `chunks`; a prompt that begins with 0 is refused, with 1 cut off, with 2 broken."""

    chunks: ClassVar[list[dict]] = []
    bodies: ClassVar[list[dict]] = []
    authorizations: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self._respond(200, "application/json", json.dumps({"data": [{"id": "served"}]}))

    def do_POST(self) -> None:
        assert self.path == "/v1/completions"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        self.authorizations.append(self.headers["Authorization"])
        events = [json.dumps(chunk) for chunk in self.chunks]
        match body["prompt"][0]:
            case 0:
                self._respond(400, "application/json", '{"error": "no such parameter"}')
                return
            case 1:
                events = events[:1]
            case 2:
                events = [*events[:1], json.dumps({"error": {"message": "out of memory"}})]
            case _:
                events.append("[DONE]")
        self._respond(200, "text/event-stream", "".join(f"data: {e}\n\n" for e in events))

    def _respond(self, status: int, kind: str, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Tests are quiet."""


@contextmanager
def openai_server() -> Iterator[str]:
    """Its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()
