"""A model hub on loopback, which serves one folder as the model `test/tiny`."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HUB_MODEL = "test/tiny"
_COMMIT = "0" * 40


@dataclass
class Hub:
    folder: Path
    url: str = ""
    # Names of downloaded files.
    downloads: list[str] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        files = {file.name: file for file in sorted(self.hub.folder.iterdir())}
        if path.startswith(f"/api/models/{HUB_MODEL}/tree/"):
            self._json(
                [
                    {"type": "file", "path": n, "size": f.stat().st_size, "oid": _etag(f)}
                    for n, f in files.items()
                ]
            )
        elif path.startswith(f"/api/models/{HUB_MODEL}"):
            names = [{"rfilename": name} for name in files]
            self._json({"id": HUB_MODEL, "modelId": HUB_MODEL, "sha": _COMMIT, "siblings": names})
        elif path.startswith(f"/{HUB_MODEL}/resolve/") and path.rpartition("/")[2] in files:
            file = files[path.rpartition("/")[2]]
            if self.command == "GET":
                self.hub.downloads.append(file.name)
            self._respond(file.read_bytes(), ETag=f'"{_etag(file)}"', X_Repo_Commit=_COMMIT)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _json(self, value: object) -> None:
        self._respond(json.dumps(value).encode())

    def _respond(self, data: bytes, **headers: str) -> None:
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Tests are quiet."""


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def serve_hub(folder: Path) -> Iterator[Hub]:
    hub = Hub(folder)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()
