"""A worker of two ranks, shards or stages, behind real services: token for token what one rank
gives, among chunked prompts, shared prefixes, preemption and swapping; and, also with stages of two
ranks, the types in which no equality is promised.

`test_e2e_equality.py` compares one of its families with transformers in all parameters.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
import torch
from mixed_requests import BLOCK_SIZE, NUM_REQUESTS, SETTINGS, mixed_prompts
from pool_watch import PoolWatch
from tiny_models import FAMILIES, MIXTURES, VOCAB_SIZE, Reference, save_model
from tiny_tokenizer import save_tokenizer

from quire.client.async_client import AsyncClient
from quire.client.operations import Operations
from quire.client.outputs import RequestOutput
from quire.client.sampling_params import SamplingParams
from quire.internal.v1.operations_pb2 import WorkerStatus
from quire.launcher.redis import EmbeddedRedis
from quire.launcher.stack import LocalStack

pytestmark = pytest.mark.slow

_TWO_RANKS = {"QUIRE_WORKER_TENSOR_PARALLEL_SIZE": "2"}
_TWO_STAGES = {"QUIRE_WORKER_PIPELINE_PARALLEL_SIZE": "2"}
# Fewer than the requests need at once.
_FEW_BLOCKS = {"QUIRE_WORKER_NUM_BLOCKS": "61", "QUIRE_WORKER_SWAP_SPACE": "1MiB"}
_NUM_TOKENS = 24
_DEMO = Path(__file__).parents[2] / "demo" / "model"
# Log-probabilities by which a token may be behind the most likely one of float32.
_ROUNDING = {"bfloat16": 0.1, "int8": 0.2}


def saved(name: str, folder: Path) -> Path:
    model = save_model((FAMILIES | MIXTURES)[name](), folder)
    save_tokenizer(model, VOCAB_SIZE)
    return model


@contextmanager
def serving(model: Path, redis_server: EmbeddedRedis, **settings: str) -> Iterator[LocalStack]:
    with LocalStack(str(model), redis_url=redis_server.url, settings=SETTINGS | settings) as stack:
        yield stack
        with redis.Redis.from_url(redis_server.url) as client:
            assert PoolWatch(client).is_conserved
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()


async def generate(
    stack: LocalStack, prompts: list[list[int]], params: list[SamplingParams]
) -> list[RequestOutput]:
    """All at once."""
    async with AsyncClient(stack.address) as client:
        return await asyncio.gather(*map(client.generate, prompts, params))


def status_of(stack: LocalStack) -> WorkerStatus:
    leader = stack.leader()
    assert leader is not None
    assert leader.address is not None
    with Operations(leader.address) as operations:
        [worker] = operations.status(False, 5).workers
    return worker


def num_preempted(worker: WorkerStatus) -> dict[str, int]:
    return {"swap": worker.num_preempted_by_swap, "recompute": worker.num_preempted_by_recompute}


def mixed_params() -> list[SamplingParams]:
    """Greedy and seeded, of one choice and of four."""
    return [
        SamplingParams(
            temperature=0.8 * (at % 2),
            top_p=0.95,
            seed=at,
            n=4 if at % 4 == 3 else 1,
            max_tokens=_NUM_TOKENS,
            ignore_eos=True,
        )
        for at in range(NUM_REQUESTS)
    ]


@pytest.mark.parametrize(
    ("name", "mode", "ranks"),
    [
        ("llama", "swap", _TWO_RANKS),
        ("gpt_oss", "recompute", _TWO_RANKS),
        ("gemma2", "swap", _TWO_STAGES),
    ],
)
async def test_two_ranks_give_what_one_gives(
    name: str, mode: str, ranks: dict[str, str], tmp_path: Path, redis_server: EmbeddedRedis
) -> None:
    model, prompts, params = saved(name, tmp_path), mixed_prompts(), mixed_params()
    with serving(model, redis_server) as stack:
        expected = await generate(stack, prompts, params)
        assert num_preempted(status_of(stack)) == {"swap": 0, "recompute": 0}
    preemption = {**_FEW_BLOCKS, "QUIRE_SCHEDULER_PREEMPTION_MODE": mode}
    with serving(model, redis_server, **ranks, **preemption) as stack:
        found = await generate(stack, prompts, params)
        worker = status_of(stack)
    assert num_preempted(worker)[mode] > 0
    assert sum(output.usage.cached_prompt_tokens for output in found) >= 2 * BLOCK_SIZE
    for one, other in zip(expected, found, strict=True):
        assert [c.token_ids for c in other.outputs] == [c.token_ids for c in one.outputs]


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("bfloat16", _TWO_RANKS),
        ("int8", _TWO_RANKS),
        ("bfloat16", _TWO_STAGES),
        ("int8", _TWO_RANKS | _TWO_STAGES),
    ],
)
async def test_rounded_weights_are_served(
    kind: str, ranks: dict[str, str], redis_server: EmbeddedRedis
) -> None:
    """Every token of the demo model is about as likely in float32 as the best."""
    setting = "QUIRE_WORKER_DTYPE" if kind == "bfloat16" else "QUIRE_WORKER_QUANTIZATION"
    prompts = mixed_prompts()
    params = SamplingParams(temperature=0, max_tokens=_NUM_TOKENS, ignore_eos=True)
    with serving(_DEMO, redis_server, **ranks, **{setting: kind}) as stack:
        outputs = await generate(stack, prompts, [params] * NUM_REQUESTS)
    reference = Reference(_DEMO)
    for prompt, output in zip(prompts, outputs, strict=True):
        [choice] = output.outputs
        assert len(choice.token_ids) == _NUM_TOKENS
        logprobs = torch.stack(list(reference.logprobs(prompt, choice.token_ids)))
        chosen = logprobs.gather(1, torch.tensor(choice.token_ids).unsqueeze(1))
        assert (logprobs.amax(1) - chosen.squeeze(1)).max() < _ROUNDING[kind]
