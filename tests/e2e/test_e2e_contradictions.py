"""Requests that contradict themselves in the middle of their output, in real processes."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tokenizers import Tokenizer

from quire import AsyncClient, RequestDelta, SamplingParams, StructuredOutput
from quire.client.errors import InvalidArgumentError
from quire.launcher.stack import LocalStack

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "demo" / "model"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
DIGITS = [TOKENIZER.token_to_id(digit) for digit in "0123456789"]
# Each could be served; where one of all begins, the library's limit is reached.
MANY = [
    {"type": "object", "properties": {f"{name}{n}": {"type": "integer"} for n in range(250)}}
    for name in "pqrst"
]
NESTED = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"anyOf": MANY}},
    "required": ["a", "b"],
}
PROMPT = "Return the"

pytestmark = pytest.mark.slow


# Parameters, in Python and in HTTP's body; the field over gRPC and HTTP; the reason.
Case = tuple[dict[str, Any], dict[str, Any], str, str, str]
# The first three digits are possible, the end behind them is not.
NO_END: Case = (
    {"structured_output": StructuredOutput(regex="[0-9]{3}"), "allowed_token_ids": DIGITS},
    {"structured_outputs": {"regex": "[0-9]{3}"}, "allowed_token_ids": DIGITS},
    "sampling_params.allowed_token_ids.ids",
    "allowed_token_ids",
    "NO_POSSIBLE_TOKEN",
)
LIMIT: Case = (
    {"structured_output": StructuredOutput(json=NESTED)},
    {"structured_outputs": {"json": NESTED}},
    "sampling_params.structured_output.json_schema",
    "structured_outputs.json",
    "FORMAT_TOO_COMPLEX",
)
UNKNOWN: Case = (
    {"processor_args": {"other": 1}},
    {"processor_args": {"other": 1}},
    "sampling_params.processor_args.other",
    "processor_args.other",
    "UNKNOWN_PROCESSOR",
)
REFUSED: Case = (
    {"processor_args": {"no_tokens": {"token_ids": [10**6]}}},
    {"processor_args": {"no_tokens": {"token_ids": [10**6]}}},
    "sampling_params.processor_args.no_tokens",
    "processor_args.no_tokens",
    "INVALID_PROCESSOR_ARGS",
)
CASES = {"no end": NO_END, "limit": LIMIT, "unknown": UNKNOWN, "refused": REFUSED}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """Its worker has the processor of the documentation."""
    folder = tmp_path_factory.mktemp("package")
    page = (ROOT / "docs" / "logits.md").read_text()
    (folder / "quire_no_tokens.py").write_text(
        re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[0]
    )
    metadata = folder / "quire_no_tokens-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: quire-no-tokens\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[quire.logits_processors]\nno_tokens = quire_no_tokens:NoTokens\n"
    )
    settings = {
        "QUIRE_WORKER_DTYPE": "float32",
        "QUIRE_WORKER_DEVICE": "cpu",
        "QUIRE_WORKER_THREADS": "1",
        "QUIRE_WORKER_MAX_MODEL_LEN": "512",
        "QUIRE_WORKER_LOGITS_PROCESSORS": "no_tokens",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        with LocalStack(
            str(MODEL), num_gateways=2, http_listen="127.0.0.1:0", settings=settings
        ) as stack:
            yield stack


@pytest.fixture
async def client(stack: LocalStack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(stack.addresses[0]) as client:
        yield client


async def read(stream: AsyncIterator[RequestDelta], received: list[str]) -> None:
    async for message in stream:
        received += [delta.text for delta in message.outputs]


@pytest.mark.parametrize("name", CASES)
async def test_over_grpc(stack: LocalStack, client: AsyncClient, name: str) -> None:
    """Unary, streamed, and resumed at the other gateway; requests beside it are not disturbed."""
    params, _, field, _, reason = CASES[name]
    sampling = SamplingParams(max_tokens=100, seed=1, **params)
    undisturbed = SamplingParams(seed=2, structured_output=StructuredOutput(regex="[a-z]{40}"))
    beside = asyncio.create_task(client.generate(PROMPT, undisturbed))
    with pytest.raises(InvalidArgumentError) as unary:
        await client.generate(PROMPT, sampling)
    request_id, received = f"stream-{reason}", list[str]()
    stream = client.stream_generate(PROMPT, sampling, request_id=request_id, resume_window_s=30)
    with pytest.raises(InvalidArgumentError) as streamed:
        await read(stream, received)
    assert "".join(received).isdigit() == (name == "no end")
    for error in (unary.value, streamed.value):
        assert (error.field, error.reason) == (field, reason)
    async with AsyncClient(stack.addresses[1]) as other:
        with pytest.raises(InvalidArgumentError) as resumed:
            await read(other.resume(request_id), [])
    assert resumed.value.reason == reason
    assert resumed.value.message == streamed.value.message
    assert (await beside).outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("name", CASES)
async def test_over_http(stack: LocalStack, name: str) -> None:
    _, fields, _, param, reason = CASES[name]
    body = {"prompt": PROMPT, "max_tokens": 100, "seed": 1, **fields}
    async with httpx2.AsyncClient(
        base_url=f"http://{stack.http_addresses[0]}", timeout=60
    ) as client:
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 400
        expected = response.json()["error"]
        assert (expected["param"], expected["code"]) == (param, reason.lower())
        assert expected["message"].startswith(f"{param}: ")
        request_id = f"http-{reason}"
        response = await client.post(
            "/v1/completions", json={**body, "stream": True}, headers={"x-request-id": request_id}
        )
        *_, last = response.text.strip().splitlines()
        assert json.loads(last.removeprefix("data: "))["error"] == expected
    async with httpx2.AsyncClient(base_url=f"http://{stack.http_addresses[1]}") as other:
        response = await other.get(f"/v1/requests/{request_id}/events")
        assert response.status_code == 400
        assert response.json()["error"] == expected
