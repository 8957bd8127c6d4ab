"""A real HTTP server with the two endpoints of batches, scripted by the requests' prompts."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Api:
    """Responds with the prompt, or with the last message.

    `refused` gets 400, `text` a response that is not JSON, `full` 429 at its first attempt, `drop`
    no response at its first attempt, `long` none at its first two after 0.4 s, `late` none at its
    first 20 after 0.1 s, `never` none at all, `barrier N` a response once N such requests wait.
    """

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    authorizations: set[str | None] = field(default_factory=set)
    # Attempts per request id.
    attempts: Counter[str] = field(default_factory=Counter)
    barriers: dict[int, threading.Barrier] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: Api

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        request_id = self.headers["X-Request-Id"]
        with self.api.lock:
            self.api.bodies.append(body)
            self.api.authorizations.add(self.headers["Authorization"])
            self.api.attempts[request_id] += 1
            attempt = self.api.attempts[request_id]
        is_chat = self.path == "/v1/chat/completions"
        text = body["messages"][-1]["content"] if is_chat else body["prompt"]
        match text.split():
            case ["refused"]:
                self._respond(400, '{"error": {"message": "no"}}', request_id)
            case ["text"]:
                self._respond(200, "<html>", request_id)
            case ["full"] if attempt == 1:
                self._respond(429, '{"error": {"message": "full"}}', request_id)
            case ["never"]:
                self.close_connection = True
            case ["long"] if attempt <= 2:
                time.sleep(0.4)
                self.close_connection = True
            case ["late"] if attempt <= 20:
                time.sleep(0.1)
                self.close_connection = True
            case ["drop"] if attempt == 1:
                self.close_connection = True
            case _:
                if text.startswith("barrier"):
                    self._barrier(int(text.split()[1])).wait(30)
                self._respond(200, json.dumps({"path": self.path, "text": text}), request_id)

    def _barrier(self, number: int) -> threading.Barrier:
        with self.api.lock:
            return self.api.barriers.setdefault(number, threading.Barrier(number))

    def _respond(self, status: int, text: str, request_id: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text.encode())))
        self.send_header("X-Request-Id", request_id)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Tests are quiet."""


@contextmanager
def serve_api() -> Iterator[Api]:
    api = Api()
    handler = type("Handler", (_Handler,), {"api": api})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    api.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield api
    server.shutdown()
    thread.join()
    server.server_close()
