"""The demonstration's second act: parts of the stack are killed in mid-sentence."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from quire.async_client import AsyncClient
from quire.errors import QuireError
from quire.launcher.processes import ServiceProcess
from quire.launcher.stack import LocalStack
from quire.operations import Operations
from quire.outputs import RequestDelta
from quire.sampling import SamplingParams

_PROMPT = "Return a list of"
_PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=320, ignore_eos=True)
# After how many tokens the parts are killed; the gateway last, for the client to go on elsewhere.
_KILL_AT = (60, 130, 200)
_ASK_TIMEOUT_S = 1.0


@dataclass
class Fault:
    """A process that was killed, and what the reader of the text saw of it."""

    name: str
    num_tokens: int
    gap_s: float = 0.0


class Witness:
    """Notes what comes of a stream, and its longest pause behind each fault."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.token_ids: list[int] = []
        # Places of tokens, as the server numbers them.
        self.places: list[int] = []
        self.faults: list[Fault] = []
        self._clock = clock
        self._last_s = clock()

    def killed(self, name: str) -> None:
        self.faults.append(Fault(name, len(self.token_ids)))
        self._last_s = self._clock()

    def see(self, delta: RequestDelta) -> None:
        now = self._clock()
        for output in delta.outputs:
            first = output.first_token_index
            self.places.extend(range(first, first + len(output.token_ids)))
            self.token_ids.extend(output.token_ids)
        if self.faults:
            self.faults[-1].gap_s = max(self.faults[-1].gap_s, now - self._last_s)
        self._last_s = now

    def verdict(self, undisturbed: Sequence[int]) -> str:
        """What was lost, repeated and changed, token by token."""
        lost = len(set(range(len(undisturbed))) - set(self.places))
        repeated = len(self.places) - len(set(self.places))
        changed = sum(
            place < len(undisturbed) and undisturbed[place] != token_id
            for place, token_id in zip(self.places, self.token_ids, strict=True)
        )
        return f"{lost} tokens lost, {repeated} repeated, {changed} changed"


async def show_faults(stack: LocalStack, console: Console) -> None:
    """Streams a text, and the same text again while a worker, the leading scheduler and the
    gateway that serves it are killed. Needs a stack with `restart`, and two of each kind."""
    console.rule("One long text, while its server is killed part by part", align="left")
    async with AsyncClient(",".join(stack.addresses)) as client:
        undisturbed = Witness()
        async for delta in client.stream_generate(_PROMPT, _PARAMS):
            undisturbed.see(delta)
        witness = await _stream_and_kill(stack, client, console)
    console.print("\n")
    console.print(_gaps(witness.faults))
    count = len(undisturbed.token_ids)
    verdict = witness.verdict(undisturbed.token_ids)
    console.print(f"Of {count} tokens, compared with the same request undisturbed: {verdict}.\n")


async def _stream_and_kill(stack: LocalStack, client: AsyncClient, console: Console) -> Witness:
    victims = [
        lambda: busiest_worker(stack),
        stack.leader,
        lambda: _at(stack.processes("gateway"), client.current_target),
    ]
    due = list(zip(_KILL_AT, victims, strict=True))
    witness = Witness()
    console.print(_PROMPT, style="bold", end="")
    async for delta in client.stream_generate(_PROMPT, _PARAMS):
        witness.see(delta)
        console.print(Text(delta.text), end="", soft_wrap=True)
        if due and len(witness.token_ids) >= due[0][0]:
            # The text goes on while it is asked who is to be killed.
            victim = await asyncio.to_thread(due.pop(0)[1])
            if victim is not None:
                victim.kill()
                witness.killed(victim.name)
                console.print(f" [bold red]<kill -9 {escape(victim.name)}>[/bold red] ", end="")
    return witness


def busiest_worker(stack: LocalStack) -> ServiceProcess:
    """The worker that runs the request, where that is the only one; any if nobody says."""
    workers = stack.processes("worker")
    leader = stack.leader()
    if leader is None or leader.address is None:
        return workers[0]
    try:
        with Operations(leader.address) as operations:
            status = operations.status(False, _ASK_TIMEOUT_S)
    except QuireError:
        return workers[0]
    busiest = max(status.workers, key=lambda w: w.num_running + w.num_assigned, default=None)
    return (busiest and _at(workers, busiest.address)) or workers[0]


def _at(processes: Sequence[ServiceProcess], address: str) -> ServiceProcess | None:
    return next((process for process in processes if process.address == address), None)


def _gaps(faults: Sequence[Fault]) -> Table:
    table = Table("killed", "after tokens", "longest pause")
    for column in table.columns[1:]:
        column.justify = "right"
    for fault in faults:
        table.add_row(fault.name, str(fault.num_tokens), f"{fault.gap_s * 1000:.0f} ms")
    return table
