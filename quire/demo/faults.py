"""The demonstration's second part: kills processes of the stack during a stream."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from quire.client.async_client import AsyncClient
from quire.client.errors import QuireError
from quire.client.operations import Operations
from quire.client.outputs import RequestDelta
from quire.client.sampling_params import SamplingParams
from quire.launcher.processes import ServiceProcess
from quire.launcher.stack import LocalStack

_PROMPT = "Return a list of"
_PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=320, ignore_eos=True)
# Numbers of tokens after which worker, leader and gateway are killed.
_KILL_AT = (60, 130, 200)
_STATUS_TIMEOUT_S = 1.0


@dataclass
class Fault:
    """A killed process, and its effect on the stream."""

    name: str
    # Received before the fault.
    num_tokens: int
    # The longest pause before the next fault.
    gap_s: float = 0.0


class StreamRecorder:
    """Records a stream's tokens, and its longest pause after each fault."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.token_ids: list[int] = []
        # Indices of the tokens within the completion.
        self.indices: list[int] = []
        self.faults: list[Fault] = []
        self._clock = clock
        self._last_s = clock()

    def killed(self, name: str) -> None:
        self.faults.append(Fault(name, len(self.token_ids)))
        self._last_s = self._clock()

    def record(self, delta: RequestDelta) -> None:
        now = self._clock()
        for output in delta.outputs:
            first = output.first_token_index
            self.indices.extend(range(first, first + len(output.token_ids)))
            self.token_ids.extend(output.token_ids)
        if self.faults:
            self.faults[-1].gap_s = max(self.faults[-1].gap_s, now - self._last_s)
        self._last_s = now

    def verdict(self, undisturbed: Sequence[int]) -> str:
        """The numbers of lost, repeated and changed tokens."""
        lost = len(set(range(len(undisturbed))) - set(self.indices))
        repeated = len(self.indices) - len(set(self.indices))
        changed = sum(
            index < len(undisturbed) and undisturbed[index] != token_id
            for index, token_id in zip(self.indices, self.token_ids, strict=True)
        )
        return f"{lost} tokens lost, {repeated} repeated, {changed} changed"


async def show_faults(stack: LocalStack, console: Console) -> None:
    """Stream a text twice. During the second stream its worker, the leading scheduler and its
    gateway are killed. Needs a stack with `restart` and two processes per service."""
    console.rule("One long text, while a worker, the leader and a gateway are killed", align="left")
    async with AsyncClient(",".join(stack.addresses)) as client:
        undisturbed = StreamRecorder()
        async for delta in client.stream_generate(_PROMPT, _PARAMS):
            undisturbed.record(delta)
        disturbed = await _stream_and_kill(stack, client, console)
    console.print("\n")
    console.print(_gaps(disturbed.faults))
    count = len(undisturbed.token_ids)
    verdict = disturbed.verdict(undisturbed.token_ids)
    console.print(f"Of {count} tokens, compared with the same request undisturbed: {verdict}.\n")


async def _stream_and_kill(
    stack: LocalStack, client: AsyncClient, console: Console
) -> StreamRecorder:
    victims = [
        lambda: busiest_worker(stack),
        stack.leader,
        lambda: _at(stack.processes("gateway"), client.current_target),
    ]
    due = list(zip(_KILL_AT, victims, strict=True))
    recorder = StreamRecorder()
    console.print(_PROMPT, style="bold", end="")
    async for delta in client.stream_generate(_PROMPT, _PARAMS):
        recorder.record(delta)
        console.print(Text(delta.text), end="", soft_wrap=True)
        if due and len(recorder.token_ids) >= due[0][0]:
            # In a thread, so that the stream continues meanwhile.
            victim = await asyncio.to_thread(due.pop(0)[1])
            if victim is not None:
                victim.kill()
                recorder.killed(victim.name)
                console.print(f" [bold red]<kill -9 {escape(victim.name)}>[/bold red] ", end="")
    return recorder


def busiest_worker(stack: LocalStack) -> ServiceProcess:
    """The worker with the most requests; the first if the status is unavailable."""
    workers = stack.processes("worker")
    leader = stack.leader()
    if leader is None or leader.address is None:
        return workers[0]
    try:
        with Operations(leader.address) as operations:
            status = operations.status(False, _STATUS_TIMEOUT_S)
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
