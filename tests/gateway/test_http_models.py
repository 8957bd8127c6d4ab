"""Routes of the model and of the gateway itself."""

from gateway_tokenizers import byte_fallback, byte_level
from http_client import Http

from gateway_svc.text.detokenizer import TokenTexts, Vocabulary
from gateway_svc.text.token_bytes import TokenBytes


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
        assert (status, error["code"]) == (400, "no_input")
    status, error = await http.error("/detokenize", {"tokens": [10**6]})
    assert (status, error["param"]) == (400, "tokens[0]")


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
