"""Requests of all kinds, and the comparison of what two workers make of them."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
from model_stack import Outcome, Request
from tiny_models import MAX_MODEL_LEN, VOCAB_SIZE
from worker_driver import LOGPROBS_TOLERANCE, worker_settings

from quire.internal.v1.logits_pb2 import LogitsParams
from worker_svc.loading.runner_loading import load_runner
from worker_svc.runner.step_runner import LoadedRunner

NUM_REQUESTS = 32
MAX_NUM_BATCHED_TOKENS = 24
# Blocks of 4 tokens: of two long sequences, where there are rows for ten.
FEW_BLOCKS, MANY_BLOCKS = 40, 1200
# Requests have these parameters in a cycle. A vocabulary of a few tokens makes text that repeats
# itself, whether it is sampled or not.
_FEW = {"allowed_token_ids": [3, 4, 5]}
_PENALTIES = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
    "min_tokens": 6,
    "stop_token_ids": [8, 9],
    "bias_token_ids": [4, 17],
    "biases": [3.0, -2.0],
    "bad_words_token_ids": [5, 17, 7],
    "bad_words_lengths": [2, 1],
}
KINDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"temperature": 0.7}, _FEW),
    ({"num_logprobs": 3}, {"allowed_token_ids": [3, 4]}),
    ({"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.05}, {}),
    ({}, _PENALTIES),
    ({"temperature": 0.8, "top_k": 4, "top_p": 0.95}, {**_FEW, "typical_p": 0.9}),
    ({"temperature": 0.6, "num_logprobs": 2}, {**_PENALTIES, "processed_logprobs": True}),
    ({"num_prompt_logprobs": 2, "stop_token_ids": [5]}, _FEW),
]


def load(model: Path, num_blocks: int, **changes: object) -> LoadedRunner:
    """A worker for such requests. It computes prompts in chunks, beside rows that decode."""
    return load_runner(
        worker_settings(
            model,
            device="cpu",
            num_blocks=num_blocks,
            max_num_seqs=10,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            swap_space=2**20,
            weight_cache_size=0,
            **changes,
        )
    )


def requests() -> list[Request]:
    """Of mixed lengths, some with four choices, and some with a prefix of others."""
    draw = Random(7)
    prefix = [draw.randrange(VOCAB_SIZE) for _ in range(16)]
    made = []
    for at in range(NUM_REQUESTS):
        params, logits = KINDS[at % len(KINDS)]
        unit = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(2, 5))]
        prompt = (prefix if at % 3 == 0 else []) + unit * draw.randint(1, 7)
        most = min(40, MAX_MODEL_LEN - len(prompt))
        made.append(
            Request(
                prompt,
                draw.randint(most // 3, most),
                seed=at,
                n=4 if at % 7 in (1, 4) else 1,
                params=params,
                logits=LogitsParams(**logits),
            )
        )
    return made


def check_equal(found: Outcome, expected: Outcome) -> None:
    assert found.token_ids == expected.token_ids
    for one, other in (
        *((a, b) for a, b in zip(found.prompt_logprobs, expected.prompt_logprobs, strict=True)),
        *(
            (a, b)
            for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True)
            for a, b in zip(ours, theirs, strict=True)
        ),
    ):
        assert [(token_id, rank) for token_id, _, rank in one] == [
            (token_id, rank) for token_id, _, rank in other
        ]
        assert [value for _, value, _ in one] == pytest.approx(
            [value for _, value, _ in other], abs=LOGPROBS_TOLERANCE
        )
