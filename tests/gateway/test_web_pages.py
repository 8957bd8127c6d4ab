"""Web pages that a user's browser shows, and other programs, before the gateway's HTTP API.

The headers are those that browsers send.
"""

import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from http_client import Http
from starlette.datastructures import Headers

from gateway_svc.admission.web_pages import WebPages, parse_origins
from gateway_svc.server import Gateway
from gateway_svc.settings import GatewaySettings
from quire.service.api_keys import hash_key, new_key

BODY = b'{"prompt": "The", "max_tokens": 1}'
FORM_TYPES = (
    "text/plain;charset=UTF-8",
    "application/x-www-form-urlencoded",
    "multipart/form-data",
)
FOREIGN = ("https://example.com", "http://localhost:3000", "null", "HTTPS://EXAMPLE.COM")
SettingsFor = Callable[..., GatewaySettings]
Start = Callable[..., Awaitable[str]]


@dataclass
class Sent:
    """What a gateway responded to headers."""

    status: int
    code: str | None
    headers: httpx2.Headers


async def send(address: str, method: str, path: str, **headers: str) -> Sent:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    # An invalid body: a request that is taken gets 400, and needs no output.
    body = b"[]" if method == "POST" else None
    async with httpx2.AsyncClient(base_url=f"http://{address}") as client:
        response = await client.request(method, path, content=body, headers=named)
    error = response.json().get("error", {}) if response.content.startswith(b"{") else {}
    return Sent(response.status_code, error.get("code"), response.headers)


@pytest.fixture
async def start(settings_for: SettingsFor) -> AsyncIterator[Start]:
    """Starts gateways without a scheduler; returns the address of their HTTP API."""
    gateways = []

    async def begin(**settings: object) -> str:
        settings = {"http_listen": "127.0.0.1:0", "scheduler": "127.0.0.1:1", **settings}
        gateway = Gateway(settings_for(scheduler_wait_s=0, **settings))
        gateways.append(gateway)
        await gateway.start()
        assert gateway.http is not None
        return gateway.http.address.replace("0.0.0.0", "127.0.0.1")

    yield begin
    for gateway in gateways:
        await gateway.stop()


@pytest.mark.slow
async def test_a_foreign_page_cannot_send_a_form(http: Http) -> None:
    paths = ("/v1/completions", "/v1/responses", "/tokenize", "/v1/responses/resp_x/cancel")
    for origin, kind, path in itertools.product(FOREIGN, (*FORM_TYPES, None), paths):
        headers = {"origin": origin, **({} if kind is None else {"content-type": kind})}
        response = await http.client.post(path, content=BODY, headers=headers)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (403, "origin_not_allowed"), headers
        assert "--http-allowed-origins" in error["message"]
    assert http.stack.scheduler.submissions.empty()


async def test_a_foreign_page_may_not_ask(http: Http) -> None:
    headers = {
        "origin": "https://example.com",
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type",
    }
    response = await http.client.options("/v1/completions", headers=headers)
    assert response.status_code == 405
    assert "access-control-allow-origin" not in response.headers


async def test_other_requests_are_taken(http: Http) -> None:
    """Those of the gateway's own page, of proxies and of programs."""
    address = http.client.base_url.netloc.decode()
    for headers in (
        # curl without a type, and OpenAI's clients.
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json"},
        # The page; behind proxies that change Host, too.
        {"content-type": "text/plain", "origin": f"http://{address}"},
        {"content-type": "text/plain", "origin": "https://a.com", "sec-fetch-site": "same-origin"},
        {"content-type": "text/plain", "origin": "http://a.com", "x-forwarded-host": "a.com"},
        {"content-type": "application/json; charset=utf-8", "origin": "http://a.com"},
        # Programs whose windows are a browser's.
        {"content-type": "text/plain", "origin": "vscode-webview://0abc"},
        {"content-type": "text/plain", "origin": "chrome-extension://abc"},
    ):
        response = await http.client.post("/v1/completions", content=b"[]", headers=headers)
        assert response.json()["error"]["code"] == "invalid_field", headers


async def test_a_page_cannot_take_the_address(http: Http) -> None:
    """Its name has been given the address of this machine."""
    paths = ("/v1/models", "/", "/status", "/metrics", "/v1/requests/x/events")
    for host in ("evil.example", "evil.example:80", "1.evil.example", "a.local."):
        headers = {"host": host, "sec-fetch-site": "same-origin"}
        gets = [await http.client.get(path, headers=headers) for path in paths]
        headers = {"host": host, "origin": f"http://{host}", "x-forwarded-host": host}
        post = await http.client.post("/v1/completions", content=b"[]", headers=headers)
        for response in (*gets, post):
            code = response.json()["error"]["code"]
            assert (response.status_code, code) == (403, "host_not_allowed"), host


async def test_names_of_this_machine_are_taken(http: Http) -> None:
    for host in (
        "localhost",
        "LOCALHOST:8000",
        "127.0.0.1:8000",
        "127.1",
        "[::1]:8000",
        "192.168.1.5:80",
        "host.docker.internal:8000",
        "quire.localhost",
        "gateway",
        f"{socket.gethostname()}:8000",
    ):
        response = await http.client.get("/v1/models", headers={"host": host})
        assert response.status_code == 200, host


async def test_other_gateways_have_any_name(start: Start, tmp_path: Path) -> None:
    """Those that other machines reach, and those that need keys, which no page has."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"- {{name: a, keys: [{hash_key(new_key()).hex()}]}}\n")
    for settings in ({"http_listen": "0.0.0.0:0"}, {"api_keys": keys}):
        address = await start(**settings)
        assert (await send(address, "GET", "/health", host="quire.example.com")).status == 200


async def test_allowed_pages_use_the_api(start: Start) -> None:
    address = await start(
        http_allowed_origins="https://Chat.example.com:443, http://localhost:3000"
    )
    page = "https://chat.example.com"
    sent = await send(
        address,
        "OPTIONS",
        "/v1/chat/completions",
        origin=page,
        access_control_request_method="POST",
        access_control_request_headers="authorization,content-type,x-stainless-lang",
        # Chrome asks for it where a page of the internet uses an address of this machine.
        access_control_request_private_network="true",
    )
    assert sent.status == 200
    assert sent.headers["access-control-allow-private-network"] == "true"
    assert sent.headers["access-control-allow-origin"] == page
    assert "x-stainless-lang" in sent.headers["access-control-allow-headers"]
    # Errors can be read, too.
    sent = await send(address, "POST", "/v1/completions", origin=page, content_type="text/plain")
    assert (sent.status, sent.code) == (400, "invalid_field")
    assert sent.headers["access-control-allow-origin"] == page
    # A proxy of that name.
    assert (await send(address, "GET", "/health", host="chat.example.com")).status == 200
    sent = await send(
        address, "POST", "/tokenize", origin="https://evil.example", content_type="text/plain"
    )
    assert (sent.status, sent.code) == (403, "origin_not_allowed")
    assert "access-control-allow-origin" not in sent.headers
    assert (await send(address, "GET", "/health", host="evil.example")).status == 403


async def test_any_page_can_be_allowed(start: Start) -> None:
    address = await start(http_allowed_origins="*")
    sent = await send(
        address,
        "POST",
        "/tokenize",
        host="a.example",
        origin="http://a.b",
        content_type="text/plain",
    )
    assert (sent.status, sent.code) == (400, "invalid_field")
    assert sent.headers["access-control-allow-origin"] == "*"


def test_requests_without_a_host_pass() -> None:
    """HTTP/1.0 has none."""
    WebPages((), checks_hosts=True).check("GET", Headers({}))


@pytest.mark.parametrize(
    "value", ["", "chat.example.com", "https://a.com/", "https://", "https://a.com,", "http://*@a"]
)
def test_what_is_no_origin_is_refused(settings_for: SettingsFor, value: str) -> None:
    with pytest.raises(ValueError, match="must be scheme://host"):
        settings_for(http_allowed_origins=value)


def test_origins_are_as_browsers_write_them() -> None:
    assert parse_origins("HTTP://A.com:80,https://b:8443, null,app://obsidian.md") == (
        "http://a.com",
        "https://b:8443",
        "null",
        "app://obsidian.md",
    )
