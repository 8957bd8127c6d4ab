"""Finds workers by name and keeps a lane to each."""

import asyncio
import contextlib
from collections.abc import Mapping

import structlog

from quire.service.protocol import PROTOCOL_VERSION
from scheduler_svc.core.policy import blocks_for
from scheduler_svc.core.recorder import Recorder
from scheduler_svc.core.view import Limits
from scheduler_svc.engine import Engine, ServedModel
from scheduler_svc.lanes.former_pools import FormerPools
from scheduler_svc.lanes.lane import Lane
from scheduler_svc.lanes.names import Names
from scheduler_svc.lanes.options import LaneHooks, LaneOptions
from scheduler_svc.lanes.stream import LaneLost, Worker, WorkerStream
from scheduler_svc.store.errors import PoolFault, StoreUnavailable, WrongStep
from scheduler_svc.store.pool import Pool
from scheduler_svc.store.store import Store

log = structlog.get_logger()

# For what only time changes, and what Redis refused.
LOOK_S = 1.0
RETRY_S = 0.5


class WorkerRefused(Exception):
    """A worker that does not fit the others or the settings; names both values."""


# What ends a lane, or the try to open one, and is answered by another try.
_EXPECTED = (LaneLost, WorkerRefused, PoolFault, WrongStep, StoreUnavailable)


class Discovery:
    """Looks the names up every second and tries each new address until a worker answers there.

    A worker is its incarnation, not its address: an address that leads to a worker whose lane is
    open is an alias, and tried again later. An address that no longer resolves is dropped when
    its lane ends, not before.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        store: Store,
        engine: Engine,
        recorder: Recorder,
        options: LaneOptions,
        hooks: LaneHooks,
        former_pools: Mapping[int, int],
    ) -> None:
        """`former_pools`: those of a former leadership, by incarnation, with the last step that is
        known of each."""
        # There are other addresses, or others to be kept; or it is halted.
        self._stirred = asyncio.Event()
        self._names = Names(names, self._stirred.set)
        self._store = store
        self._engine = engine
        self._options = options
        self._hooks = hooks
        # Workers that are being asked for their lanes: a second address of one must not take it.
        self._entering: set[int] = set()
        # One pool is opened or dropped at a time.
        self._changing = asyncio.Lock()
        self._halting = False
        self._former = FormerPools(store, recorder, former_pools)

    async def run(self) -> None:
        """Looks up and keeps lanes, until it is halted. An unexpected error of any lane ends it."""
        keepers: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            names = group.create_task(self._names.run())
            while not self._halting:
                self._stirred.clear()
                keepers = {a: keeper for a, keeper in keepers.items() if not keeper.done()}
                for address in self._names.addresses - keepers.keys():
                    keepers[address] = group.create_task(self._keep(address))
                    keepers[address].add_done_callback(lambda _: self._stirred.set())
                async with self._changing:
                    await self._former.tidy()
                await self._rest()
            names.cancel()
            busy = {lane.address for lane in self._engine.lanes.values()}
            for address in keepers.keys() - busy:
                keepers[address].cancel()

    def halt(self) -> None:
        """Opens no lane more; `run` returns when those that are open have come to rest."""
        self._halting = True
        self._stirred.set()
        for lane in self._engine.lanes.values():
            lane.halt()

    async def _rest(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._stirred.wait()

    @property
    def steps(self) -> dict[int, int]:
        """The last step of each pool, by incarnation."""
        open_ones = {incarnation: lane.step for incarnation, lane in self._engine.lanes.items()}
        return {**self._former.steps, **open_ones}

    async def _keep(self, address: str) -> None:
        """Opens the address's lane, and opens it again, while the address is present."""
        said = ""
        task = asyncio.current_task()
        # grpc.aio can swallow a cancellation that meets the end of a call.
        while self._is_wanted(address) and not (task and task.cancelling()):
            try:
                await self._serve(address)
                said = ""
            except _EXPECTED as error:
                # Said once, not at every try; a worker that is not there yet is no trouble.
                if str(error) != said:
                    said = str(error)
                    say = log.info if isinstance(error, LaneLost) else log.warning
                    say("no lane", address=address, why=said)
            if self._is_wanted(address):
                await asyncio.sleep(RETRY_S)

    def _is_wanted(self, address: str) -> bool:
        return address in self._names.addresses and not self._halting

    async def _serve(self, address: str) -> None:
        """One lane's life, from the worker's hello to the end of its stream."""
        async with WorkerStream.connected(address) as stream:
            incarnation = await stream.identify()
            if incarnation in self._entering or incarnation in self._engine.lanes:
                # An alias.
                return
            self._entering.add(incarnation)
            try:
                entered = await self._enter(address, stream, incarnation)
            finally:
                self._entering.remove(incarnation)
            if entered is not None:
                await self._run(address, stream, *entered)

    async def _enter(
        self, address: str, stream: WorkerStream, incarnation: int
    ) -> tuple[Lane, Pool] | None:
        """Opens a worker's lane; None where nobody wants it any more."""
        leadership = self._store.leadership
        # This may take as long as the worker's step; nobody waits for it but this address.
        worker = await stream.open(leadership.epoch, leadership.holder)
        if worker.incarnation != incarnation:
            raise LaneLost("another worker has come up at its address")
        async with self._changing:
            return None if self._halting else await self._entered(address, stream, worker)

    async def _entered(
        self, address: str, stream: WorkerStream, worker: Worker
    ) -> tuple[Lane, Pool]:
        await self._former.settle()
        leadership = self._store.leadership
        limits = self._options.limits_for(worker)
        model = self._agreed(worker, limits)
        pool = self._store.pool(
            worker.incarnation, worker.num_blocks, self._options.enable_prefix_caching
        )
        first_step = await self._former.reopen(pool, address, worker.last_finished_step)
        lane = Lane(
            worker, address, stream, pool, leadership.epoch, first_step, limits,
            self._options, self._hooks,
        )  # fmt: skip
        log.info(
            "worker joined",
            address=address,
            incarnation=f"{worker.incarnation:016x}",
            num_blocks=worker.num_blocks,
        )
        self._engine.add(lane, model)
        return lane, pool

    async def _run(self, address: str, stream: WorkerStream, lane: Lane, pool: Pool) -> None:
        why = "drained"
        try:
            stream.start(lane.drain, lane.wake)
            await lane.run()
        except LaneLost as error:
            why = str(error)
            lane.blame(error)
            raise
        except BaseException as error:
            why = str(error) or type(error).__name__
            raise
        finally:
            log.info("worker left", address=address, why=why)
            # At once, for others wait for these; the pool can wait.
            lost = self._engine.remove(lane)
            self._former.add(pool, address, lane.step, [*lost, *lane.recalled])
            self._stirred.set()

    def _agreed(self, worker: Worker, limits: Limits) -> ServedModel:
        """The model that the worker serves; WorkerRefused if it is not that of the others."""
        _same("protocol version", PROTOCOL_VERSION, worker.protocol_version)
        usable = worker.num_blocks - 1 - limits.watermark
        needed = blocks_for(worker.max_model_len, worker.block_size)
        if usable < needed:
            raise WorkerRefused(
                f"its pool has {usable} usable blocks above the watermark; "
                f"one sequence of max_model_len needs {needed}"
            )
        if limits.max_num_seqs > limits.max_num_batched_tokens:
            raise WorkerRefused(
                f"max_num_seqs {limits.max_num_seqs} exceeds "
                f"max_num_batched_tokens {limits.max_num_batched_tokens}"
            )
        model = ServedModel(
            worker.model_fingerprint,
            worker.block_size,
            worker.max_model_len,
            worker.kv_cache_dtype,
        )
        served = self._engine.model or model
        _same("model fingerprint", served.fingerprint.hex(), model.fingerprint.hex())
        _same("block size", served.block_size, model.block_size)
        _same("max_model_len", served.max_model_len, model.max_model_len)
        _same("kv_cache_dtype", served.kv_cache_dtype, model.kv_cache_dtype)
        return model


def _same(what: str, served: object, offered: object) -> None:
    if served != offered:
        raise WorkerRefused(f"{what}: served is {served}, the worker has {offered}")
