"""Every field of OpenAI's official clients, streamed and not: served, or refused by its name."""

import asyncio
import inspect
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from client_programs import ROOT

from quire.launcher.stack import LocalStack

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

FOLDER = Path(__file__).parent
FILE = FOLDER / "openai_fields.json"
APIS: dict[str, Any] = json.loads(FILE.read_text())
CASES = [(api, case) for api, group in APIS.items() for case in group["cases"]]
# Arguments of the Python client's methods that are no fields of a request.
OWN = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
# The version of the client for Node.
OPENAI_NODE = "7.57.0"


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    settings = {"QUIRE_WORKER_DTYPE": "float32"}
    model = str(ROOT / "demo" / "model")
    with LocalStack(
        model, served_model_name="demo", http_listen="127.0.0.1:0", settings=settings
    ) as stack:
        yield f"http://{stack.http_addresses[0]}/v1"


def method(client: Any, api: str) -> Any:
    return {
        "completions": client.completions,
        "chat": client.chat.completions,
        "responses": client.responses,
    }[api].create


def body_of(api: str, change: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "demo", **APIS[api]["base"], **change}
    if "max_completion_tokens" in change:
        del body["max_tokens"]
    # Fields that are not OpenAI's.
    known = set(inspect.signature(method(openai.OpenAI(api_key="x"), api)).parameters)
    extra = {name: body.pop(name) for name in list(body) if name not in known}
    return {**body, "extra_body": extra}


def streams_of(change: dict[str, Any]) -> list[bool]:
    """Whether the case is streamed. A response in the background has no text to compare."""
    fixed = "stream" in change or "background" in change
    return [bool(change.get("stream"))] if fixed else [False, True]


def texts_of(api: str, made: Any) -> list[str]:
    if api == "responses":
        return [made.output_text]
    return [c.text if api == "completions" else c.message.content for c in made.choices]


def add(api: str, texts: dict[int, str], chunk: Any) -> None:
    """Add a chunk's text to that of its choice."""
    if api == "responses":
        # Empty if the output is a call.
        texts.setdefault(0, "")
        if chunk.type == "response.output_text.delta":
            texts[0] += chunk.delta
        return
    for choice in chunk.choices:
        text = choice.text if api == "completions" else choice.delta.content or ""
        texts[choice.index] = texts.get(choice.index, "") + text


def refused_field(error: openai.APIError) -> str:
    assert isinstance(error, openai.APIStatusError)
    assert error.status_code in (400, 404)
    return re.split(r"[.\[]", error.param or "")[0]


@pytest.mark.parametrize("api", APIS)
def test_no_field_of_the_client_is_left_out(api: str) -> None:
    fields = set(inspect.signature(method(openai.OpenAI(api_key="x"), api)).parameters) - OWN
    tried = {name for one, case in CASES if one == api for name in case["change"]}
    assert fields - tried - set(APIS[api]["base"]) - {"stream"} == set()


@pytest.mark.parametrize(("api", "case"), CASES, ids=lambda value: str(value)[:60])
def test_a_field_is_served_or_refused(base_url: str, api: str, case: dict[str, Any]) -> None:
    outcomes = []
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        for stream in streams_of(case["change"]):
            texts: dict[int, str] = {}
            try:
                made = method(client, api)(**{**body_of(api, case["change"]), "stream": stream})
                if stream:
                    for chunk in made:
                        add(api, texts, chunk)
                else:
                    texts = dict(enumerate(texts_of(api, made)))
            except openai.APIError as error:
                outcomes.append(refused_field(error))
            else:
                outcomes.append(texts)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert (outcomes[0] if isinstance(outcomes[0], str) else None) == case.get("refused")


async def test_the_asynchronous_client_gets_the_same(base_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        for api, case in CASES:
            results = [
                await _outcome(client, api, case["change"], stream)
                for stream in streams_of(case["change"])
            ]
            refused = results[0] if isinstance(results[0], str) else None
            assert refused == case.get("refused"), case
            assert all(result == results[0] for result in results), case


async def _outcome(
    client: openai.AsyncOpenAI, api: str, change: dict[str, Any], stream: bool
) -> str | dict[int, str]:
    """The name of the field that is refused, or the texts."""
    texts: dict[int, str] = {}
    try:
        made = await method(client, api)(**{**body_of(api, change), "stream": stream})
        if not stream:
            return dict(enumerate(texts_of(api, made)))
        chunks: AsyncIterator[Any] = made
        async for chunk in chunks:
            add(api, texts, chunk)
    except openai.APIError as error:
        return refused_field(error)
    return texts


async def test_the_client_for_node_gets_the_same(base_url: str, tmp_path: Path) -> None:
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed")
    shutil.copy(FOLDER / "openai_fields.mjs", tmp_path)
    install = ["npm", "install", "--silent", "--no-audit", "--no-fund", f"openai@{OPENAI_NODE}"]
    for command in (install, ["node", "openai_fields.mjs", str(FILE), base_url, "demo"]):
        process = await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
    assert re.fullmatch(r"\d+ calls\n", output.decode()), output.decode()
