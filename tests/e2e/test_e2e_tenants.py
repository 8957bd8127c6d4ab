"""Tenants of a whole stack with two gateways and a simulated worker."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire.client.async_client import AsyncClient
from quire.client.errors import QuireError
from quire.client.sampling_params import SamplingParams
from quire.launcher.stack import LocalStack
from quire.llm import LLM
from quire.service.api_keys import hash_key, new_key

PROMPT = list(range(1, 50))
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
LONG = SamplingParams(max_tokens=100, ignore_eos=True)


@dataclass
class Tenants:
    addresses: list[str]
    first: str
    second: str


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    """Two tenants, of which the second one may have two live requests."""
    first, second = new_key(), new_key()
    file: Path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    file.write_text(
        f"- {{name: first, keys: [{hash_key(first).hex()}]}}\n"
        f"- {{name: second, keys: [{hash_key(second).hex()}], limits: {{live_requests: 2}}}}\n"
    )
    settings = {
        "QUIRE_WORKER_ENGINE": "sim",
        "QUIRE_WORKER_SIM_STEP_MS": "2",
        "QUIRE_WORKER_MAX_NUM_SEQS": "8",
        "QUIRE_GATEWAY_API_KEYS": str(file),
    }
    with LocalStack("demo/model", num_gateways=2, settings=settings) as stack:
        yield Tenants(stack.addresses, first, second)


async def test_cached_prefixes_and_request_ids_are_a_tenants_own(tenants: Tenants) -> None:
    address, other_address = tenants.addresses
    async with (
        AsyncClient(address, api_key=tenants.first) as first,
        AsyncClient(other_address, api_key=tenants.second) as second,
    ):
        cached = []
        for client in (first, second, first, second):
            output = await client.generate(PROMPT, SHORT)
            cached.append(output.usage.cached_prompt_tokens > 0)
        assert cached == [False, False, True, True]
        for client in (first, second):
            assert (await client.generate([5], SHORT, request_id="same")).outputs[0].token_ids
        stream = first.stream_generate(PROMPT, LONG, request_id="firsts", resume_window_s=10)
        await anext(stream)
        with pytest.raises(QuireError) as cancelling:
            await second.cancel("firsts")
        with pytest.raises(QuireError) as resuming:
            await anext(second.resume("firsts"))
        assert {one.value.code.name for one in (cancelling, resuming)} == {"NOT_FOUND"}
        await first.cancel("firsts")
        with pytest.raises(QuireError, match="CANCELLED"):
            _ = [delta async for delta in stream]


async def test_a_limit_holds_over_all_gateways(tenants: Tenants) -> None:
    address, other_address = tenants.addresses
    async with (
        AsyncClient(address, api_key=tenants.second) as one,
        AsyncClient(other_address, api_key=tenants.second) as other,
    ):
        streams = [client.stream_generate(PROMPT, LONG) for client in (one, other)]
        for stream in streams:
            await anext(stream)
        for client in (one, other):
            with pytest.raises(QuireError) as refused:
                await client.generate(PROMPT, SHORT)
            assert refused.value.code.name == "RESOURCE_EXHAUSTED"
            assert refused.value.reason == "LIVE_REQUESTS"
        for stream in streams:
            await stream.aclose()


async def test_a_flood_of_one_tenant_does_not_delay_the_other(tenants: Tenants) -> None:
    address, other_address = tenants.addresses
    async with (
        AsyncClient(address, api_key=tenants.first) as first,
        AsyncClient(other_address, api_key=tenants.second) as second,
    ):
        flood = [asyncio.create_task(first.generate(PROMPT, LONG)) for _ in range(200)]
        await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
        await second.generate(PROMPT, SHORT)
        num_ended = sum(task.done() for task in flood)
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
    # At most two batches of eight; in order of arrival it would be all.
    assert num_ended < 100


def test_the_command_and_offline_inference_send_a_key(tenants: Tenants) -> None:
    target = tenants.addresses[0]
    command = ["generate", "t1 t2", "--max-tokens=2", f"--target={target}"]
    run = CliRunner().invoke
    assert run(app, [*command, f"--api-key={tenants.first}"]).exit_code == 0
    assert run(app, command, env={"QUIRE_API_KEY": tenants.first}).exit_code == 0
    refused = run(app, command)
    assert refused.exit_code == 1
    assert "UNAUTHENTICATED: an API key is needed" in refused.output
    load = ["bench", f"--target={target}", "--num-prompts=2", "--output-len=2", "--warmups=0"]
    assert run(app, load, env={"QUIRE_API_KEY": tenants.first}).exit_code == 0
    assert run(app, load).exit_code == 1
    with LLM(target=target, api_key=tenants.second) as llm:
        assert llm.generate("t1", SHORT)[0].outputs[0].token_ids
    with pytest.raises(ValueError, match="api_key and tls are for the target"):
        LLM("model", api_key=tenants.first)
