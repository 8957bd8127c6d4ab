"""Sends waves of oversized requests from a process of its own, so that its client's calls and
those whose waits are measured share no event loop.

`python -m benchmarks.gateway.oversized_sender grpc|http ADDRESS`: prints a line when it is ready,
and begins when it receives one.
"""

import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc

from quire.service.channels import channel_options

AT_ONCE = 6
WAVES = 5
WAVE_PERIOD_S = 1.0
NUM_MESSAGES = 15_700_000
_GENERATE = "/quire.v1.InferenceService/Generate"
# Field 5 of GenerateRequest, a conversation, whose messages are its field 1.
_CONVERSATION, _EMPTY_MESSAGE = 5 << 3 | 2, b"\x0a\x00"
_ACCEPTED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)


def request_bytes() -> bytes:
    """A serialized request with many empty messages."""
    content = _EMPTY_MESSAGE * NUM_MESSAGES
    size, length = len(content), bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([_CONVERSATION, *length, size]) + content


def _grpc_sender(address: str) -> Callable[[], str]:
    data = request_bytes()
    channel = grpc.insecure_channel(address, options=channel_options())
    grpc.channel_ready_future(channel).result(10)
    generate: Any = channel.unary_unary(_GENERATE)

    def send() -> str:
        try:
            generate(data, timeout=60)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            if code in _ACCEPTED:
                return code.name
            raise
        raise RuntimeError("an oversized request was accepted")

    return send


def _http_sender(address: str) -> Callable[[], str]:
    host, _, port = address.rpartition(":")
    body = b'{"messages":[' + b"{}," * (2 * NUM_MESSAGES // 3) + b"{}]}"
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()

    def send() -> str:
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            # The gateway responds before it has read the body, and may close the connection.
            with suppress(ConnectionError):
                connection.sendall(head + body)
            with suppress(ConnectionError):
                response = connection.recv(4096)
                if not response.startswith(b"HTTP/1.1 4"):
                    raise RuntimeError(response[:200].decode(errors="replace"))
                return response[:12].decode()
        return "connection closed"

    return send


def main() -> None:
    protocol, address = sys.argv[1:]
    send = {"grpc": _grpc_sender, "http": _http_sender}[protocol](address)
    print("ready", flush=True)
    sys.stdin.readline()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for _ in range(WAVES):
            began = time.perf_counter()
            for result in [threads.submit(send) for _ in range(AT_ONCE)]:
                print(result.result(), flush=True)
            time.sleep(max(0.0, began + WAVE_PERIOD_S - time.perf_counter()))


if __name__ == "__main__":
    main()
