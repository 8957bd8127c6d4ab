"""The tokenizer beside the event loop."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway_svc.text import model_files
from gateway_svc.text.served_model import Model

DEMO_MODEL = Path(__file__).parents[2] / "demo/model"
# A waiting loop is woken once in the interval at which Python changes threads, 5 ms, and then not
# before the work has ended.
MOST_TICKS_OF_A_WAITING_LOOP = 8


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    with ThreadPoolExecutor(1) as threads:
        yield Model.from_files("demo", model_files.load(str(DEMO_MODEL), None), threads)


async def ticks_during(work: Awaitable[object]) -> int:
    """Times that the event loop is woken while it awaits work."""
    task = asyncio.ensure_future(work)
    ticks = 0
    while not task.done():
        await asyncio.sleep(0.001)
        ticks += 1
    await task
    return ticks


async def test_the_event_loop_goes_on_while_a_long_text_is_tokenized(model: Model) -> None:
    text = "one word after another " * 20_000
    assert await ticks_during(model.encode(text, True)) > MOST_TICKS_OF_A_WAITING_LOOP


async def test_the_event_loop_goes_on_while_many_tokens_are_decoded(model: Model) -> None:
    token_ids = [300 + at % 2000 for at in range(400_000)]
    assert await ticks_during(model.decode(token_ids, True)) > MOST_TICKS_OF_A_WAITING_LOOP


@pytest.mark.parametrize("text", ["", "one  word\n", "naïve 日本語 🙂", "<|endoftext|> a"])
async def test_tokens_are_those_of_the_library(model: Model, text: str) -> None:
    token_ids = model.files.tokenizer.encode(text).ids
    assert await model.encode(text, True) == token_ids
    assert await model.encode_each([text, text]) == [token_ids] * 2
    assert await model.decode(token_ids, True) == model.files.tokenizer.decode(token_ids)
