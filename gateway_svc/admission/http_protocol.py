"""uvicorn's HTTP protocol, with a limit on headers, errors in JSON, and without other protocols."""

import json
from typing import Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Of the headers of a request, and of trailers. httptools itself keeps any number; this is the limit
# of uvicorn's other parser.
_MAX_HEADER_BYTES: Final = 2**16
# Headers of an offer to change the protocol.
_OFFER: Final = (b"upgrade", b"http2-settings")


class HttpProtocol(HttpToolsProtocol):
    """Is closed when headers are too large. Goes on in HTTP/1.1 when a client offers HTTP/2, as
    Java's does by default: httptools takes the body for bytes of the other protocol."""

    # Received since the last headers or part of a body was complete.
    _num_header_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._num_header_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if self._has_offer():
                head = self._head_without_offer()
                self.parser = httptools.HttpRequestParser(self)
                self.data_received(head + data[offer.args[0] :])
        except httptools.HttpParserError:
            self.send_error(400, "Bad Request", "malformed_http", "the request is not HTTP/1")
        if self._num_header_bytes > _MAX_HEADER_BYTES and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                message = f"the headers have more than {_MAX_HEADER_BYTES} bytes"
                self.send_error(
                    431, "Request Header Fields Too Large", "headers_too_large", message
                )
            else:
                self.transport.close()

    def on_headers_complete(self) -> None:
        self._num_header_bytes = 0
        if not self._has_offer():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_header_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_header_bytes = 0
        if not self._has_offer():
            super().on_message_complete()

    def send_error(self, status: int, phrase: str, code: str, message: str) -> None:
        """Respond to a request that the application does not get, and close the connection."""
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = json.dumps({"error": error}).encode()
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _has_offer(self) -> bool:
        """Whether the request that is parsed offers another protocol. CONNECT demands one."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _head_without_offer(self) -> bytes:
        """The request's line and headers."""
        version = self.parser.get_http_version().encode()
        lines = [b" ".join((self.parser.get_method(), self.url, b"HTTP/" + version))]
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(one for one in options if one.lower() not in _OFFER)
            if name not in _OFFER:
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])
