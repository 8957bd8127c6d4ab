"""Streams texts from a private stack, prints their latencies, then kills parts of the stack."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from quire.client.async_client import AsyncClient
from quire.client.outputs import Usage
from quire.client.sampling_params import SamplingParams
from quire.demo.faults import show_faults
from quire.launcher.errors import LaunchError
from quire.launcher.stack import LocalStack

DEMO_MODEL = "demo/model"
_MAX_TOKENS = 96
_FIRST_PROMPT = "Return a list of"
_PROMPTS = (
    *("Open the file", "Raised when", "This class"),
    *("Convert a", "If the argument", "Wait until"),
)
_LONG_PROMPT = (
    "Read the records of a file and return them as a list of tuples. The file may be given by its "
    "name or as an open object; if it is a name, the file is opened in text mode and closed when "
    "the last record has been read. Each line holds one record, and its fields are separated by "
    "the given character. Empty lines and lines that begin with a hash sign are skipped. If a line "
    "has fewer fields than the first one, the missing fields are filled with the default value; if "
    "it has more of them, a ValueError is raised and the message gives the number of the line. The "
    "optional argument"
)


@dataclass
class ShownStream:
    """A prompt and its stream so far."""

    label: str
    prompt: str
    text: str = ""
    usage: Usage | None = None
    first_text_s: float | None = None
    duration_s: float = 0.0
    started: float = field(default_factory=time.monotonic)


def run_demo(model: str, num_workers: int, verbose: bool) -> None:
    """Run the demonstration. LaunchError or QuireError if a part of it fails."""
    if model == DEMO_MODEL and not Path(model).is_dir():
        raise LaunchError(f"no folder {model}: run the demo in the repository, or name a model")
    console = Console(highlight=False)
    console.print(f"Starting Redis, 2 schedulers, {num_workers} workers and 2 gateways ...")
    started = time.monotonic()
    stack = LocalStack(
        model,
        num_workers=num_workers,
        num_schedulers=2,
        num_gateways=2,
        restart=True,
        verbose=verbose,
    )
    with stack:
        took_s = time.monotonic() - started
        console.print(f"Serving {escape(model)} on {stack.address} after {took_s:.1f} s.\n")
        asyncio.run(_show_all(stack, console))
        console.print("Stopping ...")
    console.print("Stopped.")


async def _show_all(stack: LocalStack, console: Console) -> None:
    async with AsyncClient(stack.address) as client:
        first = await _show_one(client, console)
        several = await _show_several(client, console)
        repeated = await _show_repeated(client, console)
    console.print(_summary([first, *several, *repeated]))
    await show_faults(stack, console)


async def _show_one(client: AsyncClient, console: Console) -> ShownStream:
    console.rule("One prompt, streamed", align="left")
    shown = ShownStream("alone", _FIRST_PROMPT)
    console.print(shown.prompt, style="bold", end="")
    async for text in _stream(client, shown, seed=1):
        console.print(Text(text), end="", soft_wrap=True)
    console.print("\n")
    return shown


async def _show_several(client: AsyncClient, console: Console) -> list[ShownStream]:
    console.rule(f"{len(_PROMPTS)} prompts at once", align="left")
    several = [ShownStream(f"together {i}", prompt) for i, prompt in enumerate(_PROMPTS, start=1)]

    async def follow(shown: ShownStream, seed: int) -> None:
        async for _ in _stream(client, shown, seed):
            live.update(_side_by_side(several))

    with Live(console=console, refresh_per_second=12) as live:
        await asyncio.gather(*(follow(shown, seed) for seed, shown in enumerate(several, start=2)))
    # Without a terminal the last frame has no line end.
    if not console.is_terminal:
        console.line()
    return several


async def _show_repeated(client: AsyncClient, console: Console) -> list[ShownStream]:
    console.rule("One long prompt, twice: the second time its prefix is cached", align="left")
    repeated = [ShownStream("long", _LONG_PROMPT), ShownStream("long again", _LONG_PROMPT)]
    for shown in repeated:
        shown.started = time.monotonic()
        async for _ in _stream(client, shown, seed=20):
            pass
        console.print(f"[bold]... {_LONG_PROMPT[-21:]}[/bold]{escape(shown.text)}\n")
    return repeated


async def _stream(client: AsyncClient, shown: ShownStream, seed: int) -> AsyncIterator[str]:
    """Stream the prompt's continuation, and record it in `shown`."""
    params = SamplingParams(temperature=0.8, max_tokens=_MAX_TOKENS, seed=seed)
    async for delta in client.stream_generate(shown.prompt, params):
        elapsed_s = time.monotonic() - shown.started
        if delta.text and shown.first_text_s is None:
            shown.first_text_s = elapsed_s
        shown.text += delta.text
        shown.duration_s = elapsed_s
        shown.usage = delta.usage or shown.usage
        yield delta.text


def _side_by_side(several: Sequence[ShownStream]) -> RenderableType:
    table = Table.grid(padding=(0, 2, 1, 0))
    for shown in several:
        table.add_row(Text.assemble((shown.prompt, "bold"), shown.text))
    return table


def _summary(rows: Sequence[ShownStream]) -> Table:
    caption = "prompt: its tokens; cached: those found in the prefix cache"
    columns = ("prompt", "cached", "tokens", "first token", "tokens/s")
    table = Table("request", *columns, caption=caption)
    for column in table.columns[1:]:
        column.justify = "right"
    for shown in rows:
        usage = shown.usage or Usage(0, 0, 0)
        table.add_row(
            shown.label,
            str(usage.prompt_tokens),
            str(usage.cached_prompt_tokens),
            str(usage.completion_tokens),
            "-" if shown.first_text_s is None else f"{shown.first_text_s * 1000:.0f} ms",
            f"{usage.completion_tokens / shown.duration_s:.0f}",
        )
    return table
