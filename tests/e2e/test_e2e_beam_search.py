"""Beam searches through the whole stack, equal to those of transformers."""

import asyncio
import json
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import redis
import torch
from pool_watch import PoolWatch
from tiny_models import FAMILIES, VOCAB_SIZE, Reference, save_model
from tiny_tokenizer import save_tokenizer
from typer.testing import CliRunner
from waiting import until

from quire import LLM
from quire.cli import app
from quire.client.async_client import AsyncClient
from quire.client.outputs import BeamSearchOutput, RequestOutput
from quire.client.sampling_params import BeamSearchParams, EarlyStopping, SamplingParams
from quire.launcher.redis import EmbeddedRedis
from quire.launcher.stack import LocalStack

pytestmark = pytest.mark.slow

NUM_TOKENS = 20
WEIGHTS = {"llama": 0, "qwen3": 0, "gemma2": 4, "gpt2": 3}
# Of scores: batches round each in their own way.
TOLERANCE = 1e-4
SETTINGS = {
    "QUIRE_WORKER_BLOCK_SIZE": "16",
    "QUIRE_WORKER_MAX_NUM_SEQS": "96",
    "QUIRE_WORKER_NUM_BLOCKS": "513",
    "QUIRE_WORKER_DTYPE": "float32",
    "QUIRE_WORKER_THREADS": "1",
    "QUIRE_SCHEDULER_MAX_NUM_BATCHED_TOKENS": "160",
    "QUIRE_SCHEDULER_CHECK_EVERY_STEP": "true",
}


class Family:
    """A tiny random model, the stack that serves it, and transformers beside it."""

    def __init__(self, folder: Path, stack: LocalStack, watch: PoolWatch) -> None:
        torch.set_num_threads(1)
        self.reference = Reference(folder)
        self.stack = stack
        self.watch = watch

    def search(self, prompt: list[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
        """The sequences that transformers finds, with their scores."""
        return self.reference.search(
            prompt,
            params.max_tokens or 0,
            params.stop_token_ids or [],
            num_beams=params.beam_width,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )

    async def comes_to_rest(self) -> None:
        """All blocks are free, and no record is live."""
        await until(lambda: self.watch.num_held == 0, "the blocks' return")
        assert self.watch.is_conserved
        await until(lambda: not self.watch.live_requests(), "the records' ends")


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    redis_server: EmbeddedRedis,
) -> Iterator[Family]:
    name = request.param
    folder = save_model(FAMILIES[name](), tmp_path_factory.mktemp(name), WEIGHTS[name])
    save_tokenizer(folder, VOCAB_SIZE)
    with (
        redis.Redis.from_url(redis_server.url) as client,
        LocalStack(str(folder), redis_url=redis_server.url, settings=SETTINGS) as stack,
    ):
        yield Family(folder, stack, PoolWatch(client))
    with redis.Redis.from_url(redis_server.url) as client:
        assert PoolWatch(client).num_held == 0
        client.flushall()


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(1, VOCAB_SIZE) for _ in range(1 + 7 * at)] for at in range(count)]


def all_params() -> list[BeamSearchParams]:
    """Widths, length penalties and rules of early stopping, with tokens that end sequences."""
    cases: Iterator[tuple[int, float, EarlyStopping]] = product(
        (2, 4, 8), (0.6, 1.0, 2.0), (False, True)
    )
    return [
        BeamSearchParams(
            beam_width=width,
            max_tokens=NUM_TOKENS,
            length_penalty=penalty,
            early_stopping=stopping,
            stop_token_ids=[3 + at, 40 + at, 90 + at, 150 + at],
        )
        for at, (width, penalty, stopping) in enumerate(cases)
    ]


def check(
    family: Family, prompt: list[int], params: BeamSearchParams, found: BeamSearchOutput
) -> None:
    expected = family.search(prompt, params)
    assert [one.token_ids for one in found.sequences] == [tokens for tokens, _ in expected]
    scores = [score for _, score in expected]
    assert [one.score for one in found.sequences] == pytest.approx(scores, abs=TOLERANCE)
    for one in found.sequences:
        divisor = len(one.token_ids) ** params.length_penalty
        assert one.cum_logprob == pytest.approx(one.score * divisor, rel=1e-4)
        is_stop = one.token_ids[-1] in params.stop_token_ids
        assert one.finish_reason == ("stop" if is_stop else "length")
        assert one.stop_reason == (one.token_ids[-1] if is_stop else None)


async def test_searches_equal_those_of_transformers(family: Family) -> None:
    """Eight at once, among ordinary requests."""
    given = all_params()
    ordinary = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    num_stopped = 0
    async with AsyncClient(family.stack.address) as client:
        for start in range(0, len(given), 8):
            part = given[start : start + 8]
            chosen = prompts(8)[: len(part)]
            results = await asyncio.gather(
                *map(client.beam_search, chosen, part),
                *(client.generate(prompt, ordinary) for prompt in chosen),
            )
            searches, others = results[: len(part)], results[len(part) :]
            for prompt, params, found in zip(chosen, part, searches, strict=True):
                assert isinstance(found, BeamSearchOutput)
                check(family, prompt, params, found)
                num_stopped += sum(one.finish_reason == "stop" for one in found.sequences)
            for prompt, other in zip(chosen, others, strict=True):
                assert isinstance(other, RequestOutput)
                [alone] = await asyncio.gather(client.generate(prompt, ordinary))
                assert other.outputs == alone.outputs
    assert num_stopped >= 3
    await family.comes_to_rest()


def test_offline_and_in_the_command(family: Family) -> None:
    params = BeamSearchParams(
        beam_width=3, max_tokens=6, length_penalty=1.0, early_stopping="never", stop_token_ids=[3]
    )
    chosen = prompts(3)[1:]
    with LLM(target=family.stack.address) as llm:
        found = llm.beam_search(chosen, params)
        [of_text] = llm.beam_search("one two", params)
    for prompt, one in zip(chosen, found, strict=True):
        check(family, prompt, params, one)
    command = ["beam-search", "one two", "--target", family.stack.address, "--beam-width", "3"]
    command += ["--max-tokens", "6", "--early-stopping", "never", "--stop-token-id", "3"]
    run = CliRunner().invoke(app, [*command, "--json"])
    assert run.exit_code == 0, run.output
    printed = [one["token_ids"] for one in json.loads(run.stdout)["sequences"]]
    assert printed == [one.token_ids for one in of_text.sequences]
    run = CliRunner().invoke(app, command)
    assert run.stdout.startswith(f"[1/3] score {of_text.sequences[0].score:.4f}\n")
