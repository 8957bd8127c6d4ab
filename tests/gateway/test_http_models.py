"""Routes of the model and of the gateway itself."""

import re
from unittest.mock import Mock

import pytest
from gateway_tokenizers import BOS, EOS, byte_fallback, byte_level
from http_client import Http
from structlog.testing import capture_logs

from gateway_svc.http.service_status import to_json
from gateway_svc.scheduler.shards import ShardStatus
from gateway_svc.text.detokenizer import TokenTexts, Vocabulary
from gateway_svc.text.token_bytes import TokenBytes
from quire.internal.v1 import operations_pb2
from quire.service.tls import TLSError


async def test_models_are_listed_and_described(http: Http) -> None:
    listed = (await http.client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["tiny"]
    assert (await http.client.get("/v1/models/tiny")).json() == listed["data"][0]
    response = await http.client.get("/v1/models/some/other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_texts_and_tokens_are_converted(http: Http) -> None:
    body = {"prompt": "a fox", "return_token_strs": True}
    tokens = (await http.client.post("/tokenize", json=body)).json()
    assert tokens["tokens"] == http.stack.encode("a fox")
    assert (tokens["count"], "".join(tokens["token_strs"])) == (len(tokens["tokens"]), "a fox")
    body = {"tokens": tokens["tokens"]}
    assert (await http.client.post("/detokenize", json=body)).json() == {"prompt": "a fox"}
    body = {"messages": [{"role": "user", "content": "x"}]}
    chat = (await http.client.post("/tokenize", json=body)).json()
    assert chat["count"] > 1
    for body in ({}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}):
        status, error = await http.error("/tokenize", body)
        assert (status, error["code"], error["param"]) == (400, "no_input", "prompt")
        assert error["message"].endswith("set either prompt or messages")
    long, role = "x " * 10**5, "r" * 10**4
    for body, param in (
        ({"prompt": long}, "prompt"),
        ({"messages": [{"role": "user", "content": long}]}, "messages"),
        ({"messages": [{"role": role, "content": "x"}]}, "messages[0].role"),
    ):
        status, error = await http.error("/tokenize", body)
        assert (status, error["param"]) == (400, param)
        assert error["message"].startswith(f"{param}: ")
    status, error = await http.error("/detokenize", {"tokens": [10**6]})
    assert (status, error["param"]) == (400, "tokens[0]")


async def test_special_tokens_are_part_of_a_text(http: Http) -> None:
    [eos] = http.stack.gateway.served.get(None).files.eos_token_ids
    tokens = [*http.stack.encode("a fox"), eos]
    for change, text in (({}, f"a fox{EOS}"), ({"skip_special_tokens": True}, "a fox")):
        response = await http.client.post("/detokenize", json={"tokens": tokens, **change})
        assert response.json() == {"prompt": text}


async def test_the_tokenizer_is_described(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    files = http.stack.gateway.served.get(None).files
    assert files.chat_template is not None
    expected = {
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": None,
        "tokenizer_class": None,
        "chat_template": files.chat_template.source,
    }
    assert (await http.client.get("/tokenizer_info")).json() == expected
    monkeypatch.setitem(files.__dict__, "chat_template", None)
    assert (await http.client.get("/tokenizer_info")).json() == {**expected, "chat_template": None}


async def test_the_gateway_describes_itself(http: Http) -> None:
    assert (await http.client.get("/health")).status_code == 200
    assert (await http.client.get("/ready")).json()["status"] == "ready"
    assert (await http.client.get("/version")).json()["version"]
    assert "quire:time_to_first_token_seconds" in (await http.client.get("/metrics")).text
    assert (await http.client.get("/docs")).status_code == 200
    description = (await http.client.get("/openapi.json")).json()
    schemas = description["components"]["schemas"]
    assert {"CompletionRequest", "ChatRequest", "ResponseRequest"} <= set(schemas)
    await http.stack.gateway.health.failed("scheduler", "no worker has joined")
    response = await http.client.get("/ready")
    assert response.status_code == 503
    assert response.json()["failing"] == {"scheduler": "no worker has joined"}


async def test_a_gateway_that_drains_is_not_ready(http: Http) -> None:
    """Like its gRPC health: a balancer that asks over HTTP has to leave it, too."""
    await http.stack.gateway.drain()
    response = await http.client.get("/ready")
    assert response.status_code == 503
    assert response.json() == {
        "status": "not ready",
        "failing": {"process": "the service is stopping"},
    }
    assert (await http.client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/version", "/v1/models", "/v1/models/tiny", "/", "/docs"]
)
async def test_head_has_the_headers_of_get(http: Http, path: str) -> None:
    head, got = await http.client.head(path), await http.client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    names = ("content-type", "content-length")
    assert [head.headers[name] for name in names] == [got.headers[name] for name in names]


async def test_head_does_not_take_over_a_stream(http: Http) -> None:
    assert (await http.client.head("/v1/requests/x/events")).status_code == 405
    assert (await http.client.head("/v1/responses/resp_x")).status_code == 405
    assert (await http.client.head("/tokenize")).status_code == 405


async def test_the_page_is_served_without_other_servers(http: Http) -> None:
    page = await http.client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for name in re.findall(r'(?:src|href)="(page/[^"]+)"', page.text):
        assert (await http.client.get(f"/{name}")).status_code == 200
    assert (await http.client.get("/page/../app.py")).status_code == 404
    assert (await http.client.get("/page/nothing.js")).status_code == 404


async def test_without_a_status_the_page_says_so(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scripted scheduler has no status."""
    with capture_logs() as logs:
        response = await http.client.get("/status")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "scheduler_away"
        assert "log has the reason" in response.json()["error"]["message"]
        for reason in ("ca.pem: none", "ca.pem: none", "ca.pem: other"):
            opening = Mock(side_effect=TLSError(reason))
            monkeypatch.setattr("gateway_svc.scheduler.connection.open_aio_channel", opening)
            response = await http.client.get("/status")
            assert response.status_code == 503
            assert "ca.pem" not in response.text
    reasons = [entry["reason"] for entry in logs if entry["event"] == "status not read"]
    assert reasons[0].startswith("UNIMPLEMENTED")
    assert reasons[1:] == ["ca.pem: none", "ca.pem: other"]


def test_a_cell_of_the_page_shows_any_held_block() -> None:
    blocks = bytes([0, *[1] * 480, *[2] * 480, *[1] * 479, 3])
    worker = operations_pb2.WorkerStatus(incarnation=2**63, block_map=blocks, num_blocks=1440)
    status = operations_pb2.GetStatusResponse(epoch=3, workers=[worker])
    [shown] = to_json([ShardStatus("a:1", status)])["workers"]
    assert shown["blocks"] == "f" * 160 + "c" * 160 + "f" * 159 + "h"
    assert shown["incarnation"] == str(2**63)


def test_the_status_of_several_shards_is_their_sum() -> None:
    def status(epoch: int) -> operations_pb2.GetStatusResponse:
        return operations_pb2.GetStatusResponse(
            epoch=epoch,
            num_accepted=epoch,
            num_refused=1,
            queue=operations_pb2.QueueStatus(num_requests=2, num_tokens=10),
            workers=[operations_pb2.WorkerStatus(incarnation=epoch)],
        )

    shown = to_json([None, ShardStatus("a:1", status(5)), ShardStatus("b:1", status(7))])
    assert shown["shards"] == [None, "a:1", "b:1"]
    assert (shown["leader"], shown["epoch"]) == ("a:1", 5)
    assert (shown["num_accepted"], shown["num_refused"]) == (12, 2)
    assert shown["queue"] == {"num_requests": 4, "num_tokens": 20}
    assert [worker["incarnation"] for worker in shown["workers"]] == ["5", "7"]


def test_the_bytes_of_tokens() -> None:
    """Joined, they are the text's."""
    text = "Größe 日本語 🙂"
    for tokenizer in (byte_level(), byte_fallback()):
        vocabulary = Vocabulary.from_tokenizer(tokenizer)
        texts = TokenBytes(vocabulary, TokenTexts(vocabulary))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if tokenizer.token_to_id("<0x00>") is None:
            assert b"".join(texts[id_] for id_ in ids).decode() == text
        else:
            assert [texts[id_] for id_ in ids if id_ in vocabulary.byte_ids]
