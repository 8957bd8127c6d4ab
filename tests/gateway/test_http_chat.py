"""`/v1/chat/completions` over HTTP."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from gateway_fake_scheduler import Delta, Entry, choice_end, deltas
from gateway_tokenizers import byte_fallback
from http_client import Http

from gateway_svc.generation.choice import ChoiceUpdate
from gateway_svc.http.formats.logprobs import chat_logprobs, completion_logprobs
from gateway_svc.scheduler.events import TokenLogprobs
from gateway_svc.text import model_files
from gateway_svc.text.chat_template import ChatTemplate
from gateway_svc.text.served_model import Model
from quire.internal.v1 import gateway_pb2

CALL = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}


async def test_a_chat_completion(http: Http) -> None:
    body = {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "Say"}, {"type": "text", "text": "fox"}],
            },
        ],
        "max_completion_tokens": 7,
    }
    sending = http.start("/v1/chat/completions", body, idempotency_key="k", x_request_id="other")
    sent = await http.submission()
    assert (sent.request_id, sent.params.max_tokens) == ("k", 7)
    prompt = http.stack.gateway.served.get(None).vocabulary.decode(list(sent.prompt_token_ids))
    assert "<|system|>Be brief." in prompt
    assert "<|user|>Say\nfox" in prompt
    ids = http.stack.encode("fox")
    http.stack.scheduler.accept(sent)
    http.stack.scheduler.write(sent, 0, ids)
    http.stack.scheduler.end(sent, len(ids), num_cached_prompt_tokens=3)
    response = await sending
    assert response.headers["x-request-id"] == "k"
    completion = response.json()
    assert completion["id"] == "chatcmpl-k"
    [choice] = completion["choices"]
    assert choice["message"] == {"role": "assistant", "content": "fox", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert completion["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


@pytest.mark.parametrize("header", ["idempotency_key", "x_request_id", None])
async def test_the_scheduler_knows_whether_the_id_is_the_clients(
    http: Http, header: str | None
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    sending = http.start(
        "/v1/chat/completions", body, **({} if header is None else {header: "mine"})
    )
    sent = await http.submission()
    assert sent.has_client_id == (header is not None)
    ids = http.stack.encode("fox")
    http.stack.scheduler.accept(sent)
    http.stack.scheduler.write(sent, 0, ids)
    http.stack.scheduler.end(sent, len(ids))
    await sending


async def test_choices_of_a_stream_are_interleaved(http: Http) -> None:
    texts = ["a fox", "the dog"]
    ids = [http.stack.encode(text) for text in texts]
    body = {"messages": [{"role": "user", "content": "x"}], "n": 2, "stream": True}
    async with http.stream("/v1/chat/completions", body) as events:
        sent = await http.submission()
        http.stack.scheduler.accept(sent)
        for at in range(max(map(len, ids))):
            parts = [Delta(sent, at, ids[i][at : at + 1], i) for i in (1, 0) if at < len(ids[i])]
            http.stack.scheduler.send(deltas=deltas(*parts))
        for choice in (0, 1):
            http.stack.scheduler.end(sent, len(ids[choice]), choice=choice)
        *received, done = await events.rest()
    assert done.data == "[DONE]"
    chunks = [event.json() for event in received]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert "usage" not in chunks[0]
    for index, text in enumerate(texts):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in own) == text
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["length"]


async def test_logprobs_have_bytes(http: Http) -> None:
    """A character whose bytes are several tokens."""
    ids = http.stack.encode("語")
    assert len(ids) > 1
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1}
    sending = http.start("/v1/chat/completions", body)
    sent = await http.submission()
    assert sent.params.num_logprobs == 2
    http.stack.scheduler.accept(sent)
    entries = [[Entry(id_, -1.5, 2), Entry(7, float("-inf"), 1)] for id_ in ids]
    http.stack.scheduler.send(
        deltas=deltas(Delta(sent, 0, ids, 0, entries)), choice_ends=[choice_end(sent, len(ids))]
    )
    content = (await sending).json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "語"
    assert [entry["logprob"] for entry in content] == [-1.5] * len(ids)
    assert [len(entry["top_logprobs"]) for entry in content] == [1] * len(ids)
    assert content[0]["top_logprobs"][0]["logprob"] == -9999.0


def test_the_first_token_of_a_text_has_no_space_that_the_text_lacks(tmp_path: Path) -> None:
    tokenizer = byte_fallback()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    ids = tokenizer.encode("ab 日 ab", add_special_tokens=False).ids
    logprobs = tuple(TokenLogprobs.of_first(token_id) for token_id in ids)
    with ThreadPoolExecutor(1) as threads:
        model = Model.from_files("m", model_files.load(str(tmp_path), None), threads)
    updates = [
        ChoiceUpdate(0, "", tuple(part), first, None, logprobs[first : first + len(part)])
        for first, part in ((0, ids[:2]), (2, ids[2:]))
    ]
    entries = [entry for one in updates for entry in chat_logprobs(one, model) or ()]
    assert "".join(entry["token"] for entry in entries) == "ab 日 ab"
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "ab 日 ab"
    echo = ChoiceUpdate(0, "", tuple(ids[:1]), 0, None, logprobs[:1])
    found = completion_logprobs(echo, model)
    assert found is not None
    assert (found["tokens"], model.token_texts[ids[0]]) == (["ab"], " ab")


async def test_variables_reach_the_template(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    files = http.stack.gateway.served.get(None).files
    template = ChatTemplate("{{ messages[0].content }} {{ budget }} {{ thinking }}", {})
    monkeypatch.setitem(files.__dict__, "chat_template", template)
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "chat_template_kwargs": {"budget": 12, "thinking": False},
    }
    sending = http.start("/v1/chat/completions", body)
    sent = await http.submission()
    decode = http.stack.gateway.served.get(None).vocabulary.decode
    assert decode(list(sent.prompt_token_ids)) == "x 12 False"
    sending.cancel()


DOCUMENTS = [{"title": "A", "text": "alpha", "also": "x"}, {"text": "beta"}]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_documents_reach_the_template_with_their_fields_in_order(
    http: Http, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    model = http.stack.gateway.served.get(None)
    source = (
        "{% for document in documents or [] %}{% for name, text in document.items() %}"
        "{{ name }}:{{ text }},{% endfor %};{% endfor %}{{ messages[0].content }}"
    )
    monkeypatch.setitem(model.files.__dict__, "chat_template", ChatTemplate(source, {}))
    for documents, expected in (
        (DOCUMENTS, "title:A,text:alpha,also:x,;text:beta,;hi"),
        ([], "hi"),
        (None, "hi"),
    ):
        body = {"messages": [{"role": "user", "content": "hi"}], "documents": documents}
        sending = http.start(path, body)
        if path == "/tokenize":
            token_ids = (await sending).json()["tokens"]
        else:
            token_ids = (await http.submission()).prompt_token_ids
            sending.cancel()
        assert model.vocabulary.decode(list(token_ids)) == expected


async def test_documents_are_refused_that_the_template_does_not_render(http: Http) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "documents": DOCUMENTS}
    error = (await http.client.post("/v1/chat/completions", json=body)).json()["error"]
    assert error["code"] == "chat_template_refuses"
    assert "renders no documents; write them into a message" in error["message"]
    await http.stack.check_next_request()


DEEP: dict[str, object] = {}
for _ in range(50):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_field"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_field"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages", "chat_template_refuses"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "invalid_field",
        ),
        ({"functions": [{"name": "x"}]}, "functions", "unsupported_field"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_field"),
        ({"logprobs": True, "top_logprobs": 30}, "top_logprobs", "logprobs_out_of_range"),
        (
            {"chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs.messages",
            "reserved_variable",
        ),
        ({"service_tier": "first"}, "service_tier", "invalid_field"),
        ({"documents": [{"text": 5}]}, "documents[0].text", "invalid_field"),
        ({"documents": [{}]}, "documents[0].fields", "empty_document"),
        ({"top_logprobs": 2}, "top_logprobs", "no_logprobs"),
        ({"chat_template_kwargs": DEEP}, "chat_template_kwargs", "too_deep"),
        ({"chat_template_kwargs": {"a": [DEEP]}}, "chat_template_kwargs", "too_deep"),
        ({"chat_template_kwargs": {"a": [[[]]] * 9000}}, "chat_template_kwargs", "too_many_values"),
        ({"processor_args": {"a": [1] * 20000}}, "processor_args", "too_many_values"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
async def test_an_invalid_field_of_a_chat_is_named(
    http: Http, change: dict[str, object], param: str, code: str
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **change}
    status, error = await http.error("/v1/chat/completions", body)
    assert (status, error["param"], error["code"]) == (400, param, code)


async def test_the_last_message_is_continued(http: Http) -> None:
    path, role = "/v1/chat/completions", "assistant"
    user = {"role": "user", "content": "hi"}
    shared: dict[str, object] = {"continue_final_message": True}
    body = {"messages": [user, {"role": role, "content": "The quick"}], **shared}
    tokens = (await http.client.post("/tokenize", json=body)).json()["tokens"]
    rendered = (await http.client.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
    assert rendered.endswith("<|assistant|>The quick")
    sending = http.start(path, body)
    sent = await http.stack.scheduler.serve_one(http.stack.encode(" fox"))
    assert list(sent.prompt_token_ids) == tokens
    # The output continues a text: a space in front of its first word is part of it.
    assert gateway_pb2.ResumeState.FromString(sent.opaque).context_token_ids
    assert (await sending).json()["choices"][0]["message"]["content"] == " fox"
    field = "continue_final_message"
    for messages, change, code in (
        ([user], {"add_generation_prompt": True}, "two_ends"),
        ([user, {"role": role, "content": " "}], {}, "nothing_to_continue"),
        (
            [user, {"role": role, "content": "a", "tool_calls": [CALL]}],
            {},
            "nothing_to_continue",
        ),
    ):
        status, error = await http.error(path, {"messages": messages, **shared, **change})
        assert (status, error["param"], error["code"]) == (400, field, code)


def test_a_template_without_system_messages_gets_them_in_the_first_user_message() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    messages = [
        {"role": "developer", "content": "A"},
        {"role": "user", "content": "B"},
        {"role": "assistant", "content": "C"},
    ]
    assert ChatTemplate(source, {}).render(messages, True) == "[user]A\n\nB[assistant]C"


async def test_prompt_logprobs_are_beside_the_choices(http: Http) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 0}
    sending = http.start("/v1/chat/completions", body)
    sent = await http.submission()
    http.stack.scheduler.accept(sent)
    rest = sent.prompt_token_ids[1:]
    delta = Delta(sent, 0, [3], prompt_logprobs=[[Entry(id_, -1.5, 2)] for id_ in rest])
    http.stack.scheduler.send(deltas=deltas(delta), choice_ends=[choice_end(sent, 1)])
    first, *found = (await sending).json()["prompt_logprobs"]
    assert first is None
    assert [list(one) for one in found] == [[str(id_)] for id_ in rest]
    assert {one["logprob"] for token in found for one in token.values()} == {-1.5}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "fox"}]}, "messages"),
        ("responses", {"input": "fox"}, "input"),
        ("completions", {"prompt": "fox"}, "prompt"),
    ],
)
async def test_a_text_with_a_token_that_the_model_lacks(
    http: Http, path: str, body: dict[str, object], field: str
) -> None:
    """As where tokens were added to a tokenizer, and not to the model. The client's field has no
    such index."""
    served = http.stack.gateway.served
    model = served.get(None)
    served.set(replace(model, files=replace(model.files, vocab_size=70)))
    status, error = await http.error(f"/v1/{path}", body)
    assert (status, error["code"]) == (400, "token_id_outside_vocabulary")
    assert error["param"] == field
    assert error["message"].endswith(", and the model has only those of 0 to 69")
