"""The whole stack as real processes, token for token equal to transformers."""

import asyncio
import hashlib
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import torch
from logits_reference import ReferenceRow
from mixed_requests import (
    BLOCK_SIZE,
    MAX_NUM_BATCHED_TOKENS,
    NUM_REQUESTS,
    SETTINGS,
    mixed_prompts,
)
from pool_watch import PoolWatch
from tiny_models import FAMILIES, VOCAB_SIZE, Reference, save_model
from tiny_tokenizer import save_tokenizer
from waiting import until

from quire.client.async_client import AsyncClient
from quire.client.outputs import RequestOutput
from quire.client.sampling_params import SamplingParams
from quire.launcher.redis import EmbeddedRedis
from quire.launcher.stack import LocalStack
from worker_svc.plan.logits_params import LogitsParams

NUM_TOKENS = 24
# Seeds of weights whose outputs vary on all the prompts.
WEIGHTS = {"llama": 0, "qwen3": 0, "gemma2": 4, "gpt2": 3}

# Of log-probabilities: batches round each in its own way, and GPUs a little more.
TOLERANCE = 3e-4 if torch.cuda.is_available() else 1e-4

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


class Family:
    """A tiny random model, the stack that serves it, and transformers beside it."""

    def __init__(self, folder: Path, stack: LocalStack, watch: PoolWatch) -> None:
        torch.set_num_threads(1)
        self.reference = Reference(folder)
        self.stack = stack
        self.watch = watch

    async def generate(
        self, prompts: list[list[int]], params: list[SamplingParams]
    ) -> list[RequestOutput]:
        """All at once."""
        async with AsyncClient(self.stack.address) as client:
            return await asyncio.gather(*map(client.generate, prompts, params))

    async def comes_to_rest(self) -> None:
        """All blocks are free, and no record is live."""
        await until(lambda: self.watch.num_held == 0, "the blocks' return")
        assert self.watch.is_conserved
        await until(lambda: not self.watch.live_requests(), "the records' ends")


# Each family takes a stack.
_FAST = ("qwen3",)
# Served by a worker of two ranks.
_OF_RANKS = "gemma2-ranks"


@pytest.fixture(
    scope="module",
    params=[
        name if name in _FAST else pytest.param(name, marks=pytest.mark.slow)
        for name in (*FAMILIES, _OF_RANKS)
    ],
)
def family(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    redis_server: EmbeddedRedis,
) -> Iterator[Family]:
    name, _, has_ranks = request.param.partition("-")
    if has_ranks and torch.cuda.device_count() == 1:
        pytest.skip("each rank needs a GPU of its own, torch finds one")
    ranks = {"QUIRE_WORKER_TENSOR_PARALLEL_SIZE": "2"} if has_ranks else {}
    folder = save_model(FAMILIES[name](), tmp_path_factory.mktemp(name), WEIGHTS[name])
    save_tokenizer(folder, VOCAB_SIZE)
    with (
        redis.Redis.from_url(redis_server.url) as client,
        LocalStack(str(folder), redis_url=redis_server.url, settings=SETTINGS | ranks) as stack,
    ):
        yield Family(folder, stack, PoolWatch(client))
    with redis.Redis.from_url(redis_server.url) as client:
        # The pool outlives the scheduler, because its successor can reuse it. No block is held.
        assert PoolWatch(client).num_pools == 1
        assert PoolWatch(client).num_held == 0
        client.flushall()


async def test_greedy_output_equals_transformers(family: Family) -> None:
    prompts = mixed_prompts()
    assert len(prompts) == NUM_REQUESTS
    assert max(map(len, prompts)) > MAX_NUM_BATCHED_TOKENS
    assert sum(len(prompt) % BLOCK_SIZE == 0 for prompt in prompts) >= 4
    outputs = await family.generate(prompts, [GREEDY] * NUM_REQUESTS)
    for prompt, output in zip(prompts, outputs, strict=True):
        reference = family.reference.generate(prompt, NUM_TOKENS)
        assert len(set(reference)) >= 8
        assert output.outputs[0].token_ids == reference
    assert sum(output.usage.cached_prompt_tokens for output in outputs) >= 2 * BLOCK_SIZE
    await family.comes_to_rest()


async def test_a_seed_gives_the_same_text_alone_and_among_others(family: Family) -> None:
    prompts = mixed_prompts()
    params = [
        SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=seed, max_tokens=NUM_TOKENS)
        for seed in range(NUM_REQUESTS)
    ]
    together = await family.generate(prompts, params)
    for index in (3, 17):
        [alone] = await family.generate([prompts[index]], [params[index]])
        assert alone.outputs[0] == together[index].outputs[0]
    assert len({tuple(output.outputs[0].token_ids) for output in together}) == NUM_REQUESTS
    await family.comes_to_rest()


async def test_choices_have_seeds_of_their_own(family: Family) -> None:
    """Each is what a request of one choice with its seed is, whatever runs beside it."""
    prompts = mixed_prompts()[:12]
    params = [
        SamplingParams(temperature=0.8, top_p=0.95, seed=seed, n=4, max_tokens=NUM_TOKENS)
        for seed in range(len(prompts))
    ]
    # More sequences than rows.
    assert 4 * len(prompts) > NUM_REQUESTS
    outputs = await family.generate(prompts, params)
    again = await family.generate(prompts, params)
    assert [output.outputs for output in again] == [output.outputs for output in outputs]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert [choice.index for choice in output.outputs] == [0, 1, 2, 3]
        assert len({tuple(choice.token_ids) for choice in output.outputs}) == 4
        assert output.usage.prompt_tokens == len(prompt)
        assert output.usage.completion_tokens == 4 * NUM_TOKENS
    alone = [replace(params[5], n=None, seed=seed_of_choice(5, index)) for index in range(4)]
    singles = await family.generate([prompts[5]] * 4, alone)
    assert [single.outputs[0].token_ids for single in singles] == [
        choice.token_ids for choice in outputs[5].outputs
    ]
    await family.comes_to_rest()


def seed_of_choice(seed: int, index: int) -> int:
    if index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(struct.pack("<QI", seed, index)).digest()[:8], "little")


@pytest.mark.parametrize("k", [0, 20])
async def test_logprobs_are_those_of_transformers(family: Family, k: int) -> None:
    """Whatever chose the token: they are of the model's own distribution."""
    prompts = mixed_prompts()[:8]
    params = SamplingParams(temperature=1.5, top_k=40, max_tokens=12, logprobs=k, n=2)
    outputs = await family.generate(
        prompts, [replace(params, seed=seed) for seed in range(len(prompts))]
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        for choice in output.outputs:
            expected = family.reference.logprobs(prompt, choice.token_ids)
            entries_of = zip(choice.token_ids, choice.logprobs, expected, strict=True)
            for token_id, entries, logprobs in entries_of:
                assert next(iter(entries)) == token_id
                assert {entry.rank for entry in entries.values()} >= set(range(1, k + 1))
                for id_, entry in entries.items():
                    logprob = logprobs[id_].item()
                    assert entry.logprob == pytest.approx(logprob, abs=TOLERANCE)
                    # Tokens whose probabilities differ only by rounding can swap ranks.
                    assert (logprobs > logprob + TOLERANCE).sum() < entry.rank
                    assert entry.rank <= (logprobs >= logprob - TOLERANCE).sum()
    await family.comes_to_rest()


async def test_prompt_logprobs_are_those_of_transformers(family: Family) -> None:
    """Of 32 requests at once, with prompts in one chunk and several, of which half have been
    computed before: with their log-probabilities they are computed again."""
    prompts = mixed_prompts()[: NUM_REQUESTS // 2]
    assert max(map(len, prompts)) > MAX_NUM_BATCHED_TOKENS
    await family.generate(prompts[::2], [GREEDY] * (NUM_REQUESTS // 4))
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3, n=2)
    outputs = await family.generate(prompts * 2, [params] * NUM_REQUESTS)
    for prompt, output in zip(prompts * 2, outputs, strict=True):
        assert output.prompt_logprobs is not None
        first, *found = output.prompt_logprobs
        assert first is None
        expected = family.reference.logprobs(prompt[:1], prompt[1:])
        for token_id, entries, logprobs in zip(prompt[1:], found, expected, strict=True):
            assert next(iter(entries)) == token_id
            assert {entry.rank for entry in entries.values()} >= {1, 2, 3}
            for id_, entry in entries.items():
                assert entry.logprob == pytest.approx(logprobs[id_].item(), abs=TOLERANCE)
        assert output.usage.cached_prompt_tokens == 0
    # Their blocks serve others.
    longest = max(prompts, key=len)
    [other] = await family.generate([longest], [GREEDY])
    assert other.usage.cached_prompt_tokens >= len(longest) - BLOCK_SIZE
    assert other.prompt_logprobs is None
    await family.comes_to_rest()


async def test_greedy_choices_equal_the_single_run(family: Family) -> None:
    prompts = mixed_prompts()[:8]
    outputs = await family.generate(prompts, [replace(GREEDY, n=2)] * len(prompts))
    for prompt, output in zip(prompts, outputs, strict=True):
        reference = family.reference.generate(prompt, NUM_TOKENS)
        assert [choice.token_ids for choice in output.outputs] == [reference] * 2
    await family.comes_to_rest()


def changes_of(outputs: list[list[int]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Parameters of the client, with what the worker is to make of them: each alone, and all at
    once. `outputs` are those without them, by request."""
    stops = sorted({token for output in outputs for token in output[:4]})
    biases = {token: 3.0 if token % 2 else -2.5 for token in range(0, VOCAB_SIZE, 3)}
    allowed = [token for token in range(VOCAB_SIZE) if token % 4]
    words = [output[2:4] for output in outputs] + [output[1:2] for output in outputs[::4]]
    each: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
        ({"frequency_penalty": -0.75}, {"frequency_penalty": -0.75}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"logit_bias": biases}, {"bias_token_ids": [*biases], "biases": [*biases.values()]}),
        ({"allowed_token_ids": allowed}, {"allowed_token_ids": allowed}),
        (
            {"bad_words": [" ".join(f"t{token}" for token in word) for word in words]},
            {"bad_words": tuple(map(np.array, words))},
        ),
        (
            {"min_tokens": 9, "stop_token_ids": stops},
            {"min_tokens": 9, "stop_token_ids": stops},
        ),
    ]
    return [*each, tuple({k: v for one in each for k, v in one[i].items()} for i in (0, 1))]  # type: ignore[list-item]


async def test_changed_logits_are_those_of_the_definitions(family: Family) -> None:
    """On transformers' logits, of 32 requests at once, whose prompts take several chunks."""
    prompts = mixed_prompts()
    free = [one.outputs[0].token_ids for one in await family.generate(prompts, [GREEDY] * 32)]
    changes = changes_of(free)
    params = [
        replace(
            GREEDY,
            **changes[at % len(changes)][0],
            logprobs=3,
            logprobs_mode="processed" if at % 16 < 12 else "raw",
        )
        for at in range(NUM_REQUESTS)
    ]
    outputs = await family.generate(prompts, params)
    num_changed = 0
    for at, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        [choice] = output.outputs
        arrays = {
            k: np.array(v) if isinstance(v, list) else v
            for k, v in changes[at % len(changes)][1].items()
        }
        row = ReferenceRow(LogitsParams(**arrays), prompt)
        raw = family.reference.logits(prompt, choice.token_ids)
        for token_id, entries, logits in zip(choice.token_ids, choice.logprobs, raw, strict=True):
            changed = row.apply(logits)
            assert changed[token_id] >= changed.max() - 10 * TOLERANCE
            expected = (changed if params[at].logprobs_mode == "processed" else logits).log_softmax(
                -1
            )
            for id_, entry in entries.items():
                assert entry.logprob == pytest.approx(expected[id_].item(), abs=4 * TOLERANCE)
            row.output.append(token_id)
        num_changed += choice.token_ids != free[at]
    # A stop token ends no output before its time, and then most of them.
    lengths = [len(one.outputs[0].token_ids) for one in outputs[6 :: len(changes)]]
    assert min(lengths) >= 10
    assert num_changed > NUM_REQUESTS / 2
    await family.comes_to_rest()


async def test_seeded_output_with_changed_logits_is_the_same_alone(family: Family) -> None:
    prompts = mixed_prompts()
    together: dict[str, Any] = changes_of([[5, 6, 7, 8], [9, 10, 11, 12]])[-1][0]
    params = [
        SamplingParams(
            **together,
            temperature=0.8,
            top_p=0.95,
            typical_p=0.9,
            seed=seed,
            max_tokens=NUM_TOKENS,
            logprobs=2,
            logprobs_mode="processed",
            n=2 if seed % 4 == 0 else 1,
        )
        for seed in range(NUM_REQUESTS)
    ]
    outputs = await family.generate(prompts, params)
    for index in (3, 12, 17):
        [alone] = await family.generate([prompts[index]], [params[index]])
        assert [one.token_ids for one in alone.outputs] == [
            one.token_ids for one in outputs[index].outputs
        ]
    await family.comes_to_rest()
