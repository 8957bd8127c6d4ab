"""Discovers workers by name and keeps a lane to each."""

import asyncio
import contextlib
from collections.abc import Mapping

import structlog

from quire.service.protocol_version import PROTOCOL_VERSION
from quire.service.tls import TLS
from scheduler_svc.cluster.worker_addresses import WorkerAddresses
from scheduler_svc.core.block_fit import blocks_for
from scheduler_svc.core.crashes import CrashHistory
from scheduler_svc.core.view import Limits
from scheduler_svc.engine.detached_pools import DetachedPools
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.model_geometry import ModelGeometry
from scheduler_svc.engine.record_writer import RecordWriter
from scheduler_svc.lane.lane import Lane
from scheduler_svc.lane.options import LaneHooks, LaneOptions
from scheduler_svc.lane.worker_stream import LaneLost, OpeningRefused, WorkerInfo, WorkerStream
from scheduler_svc.store.errors import PoolFault, StoreUnavailable, WrongStep
from scheduler_svc.store.pool import Pool
from scheduler_svc.store.store import Store
from scheduler_svc.ticks import until_tick

log = structlog.get_logger()

# Interval at which detached pools are checked, without other events.
CHECK_S = 1.0
RETRY_S = 0.5
# Time for the running sequences of a worker that is given to another shard to end. Those that have
# not are computed again by the workers that stay.
GIVE_AWAY_S = 10.0


class WorkerRefused(Exception):
    """The worker does not match the other workers or the settings; the message has both values."""


# Errors that end a lane, or an attempt to open one; it is attempted again.
_EXPECTED = (LaneLost, WorkerRefused, PoolFault, WrongStep, StoreUnavailable)


class Discovery:
    """Retries each new address of the shard until a worker responds there.

    A worker is identified by its incarnation, not its address: an address of a worker whose lane is
    open is an alias, and retried later. An address that no longer resolves is dropped when its lane
    ends; the lane of one that belongs to another shard is drained.
    """

    def __init__(
        self,
        addresses: WorkerAddresses,
        shard: int,
        store: Store,
        engine: Engine,
        record_writer: RecordWriter,
        options: LaneOptions,
        hooks: LaneHooks,
        leader_steps: Mapping[int, int],
        tls: TLS | None,
    ) -> None:
        """`leader_steps`: the last step that an earlier term committed to each pool. `tls`: that of
        the connections to workers."""
        # The addresses changed, a lane ended, or discovery was halted.
        self._wake = asyncio.Event()
        self._addresses = addresses
        self._shard = shard
        self._store = store
        self._engine = engine
        self._record_writer = record_writer
        self._options = options
        self._hooks = hooks
        # Incarnations whose lanes are being opened: a second address must not open another one.
        self._opening: set[int] = set()
        # Held while a pool is opened or dropped.
        self._pool_lock = asyncio.Lock()
        self._halting = False
        self._tls = tls
        self._detached = DetachedPools(store, record_writer, leader_steps)
        self._crashes = CrashHistory()

    async def run(self) -> None:
        """Keep lanes to all workers until halted. An unexpected error of any lane ends it."""
        self._addresses.listen(self._wake.set)
        try:
            await self._keep_lanes()
        finally:
            self._addresses.stop_listening(self._wake.set)

    async def _keep_lanes(self) -> None:
        lane_tasks: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while not self._halting:
                self._wake.clear()
                lane_tasks = {a: task for a, task in lane_tasks.items() if not task.done()}
                for address in self._addresses.of(self._shard) - lane_tasks.keys():
                    lane_tasks[address] = group.create_task(self._serve_address(address))
                    lane_tasks[address].add_done_callback(lambda _: self._wake.set())
                self._give_away_lanes()
                async with self._pool_lock:
                    await self._detached.drop_expired()
                await self._wait()
            busy = {lane.address for lane in self._engine.lanes.values()}
            for address in lane_tasks.keys() - busy:
                lane_tasks[address].cancel()

    def _give_away_lanes(self) -> None:
        """Drain the lanes of workers that belong to another shard; halt those that take long."""
        for lane in self._engine.lanes.values():
            if not self._addresses.is_elsewhere(lane.address, self._shard) or lane.draining:
                continue
            log.info("worker given away", address=lane.address)
            lane.drain()
            asyncio.get_running_loop().call_later(GIVE_AWAY_S, lane.halt)

    def halt(self) -> None:
        """Open no more lanes; `run` returns when the open ones have halted."""
        self._halting = True
        self._wake.set()
        for lane in self._engine.lanes.values():
            lane.halt()

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until_tick(CHECK_S, asyncio.get_running_loop().time())):
                await self._wake.wait()

    @property
    def steps(self) -> dict[int, int]:
        """The last known step of each pool, by incarnation."""
        open_lanes = {key: lane.last_step for key, lane in self._engine.lanes.items()}
        return {**self._detached.steps, **open_lanes}

    async def _serve_address(self, address: str) -> None:
        """Serve the address's lane, and reopen it, as long as the name resolves to the address."""
        logged = ""
        task = asyncio.current_task()
        # grpc.aio can swallow a cancellation that coincides with the end of a call.
        while self._is_wanted(address) and not (task and task.cancelling()):
            try:
                await self._serve(address)
                logged = ""
            except _EXPECTED as error:
                if isinstance(error, WorkerRefused):
                    self._engine.refused_workers[address] = str(error)
                # Logged once, not at every attempt; a worker that is not up yet is no warning.
                if str(error) != logged:
                    logged = str(error)
                    write = log.info if isinstance(error, LaneLost) else log.warning
                    write("lane not open", address=address, reason=logged)
                    if isinstance(error, OpeningRefused):
                        # Another scheduler may lead with the Redis that took this one's place,
                        # while this one, cut off from its replicas, still takes writes.
                        self._store.reopen()
            if self._is_wanted(address):
                await asyncio.sleep(RETRY_S)
        self._engine.refused_workers.pop(address, None)

    def _is_wanted(self, address: str) -> bool:
        return address in self._addresses.of(self._shard) and not self._halting

    async def _serve(self, address: str) -> None:
        """Serve one lane, from the worker's hello to the end of its stream."""
        host = self._addresses.host_of(address)
        async with WorkerStream.connected(address, self._tls, host) as stream:
            incarnation = await stream.identify()
            if self._is_known(incarnation):
                # An alias.
                return
            opening = {incarnation}
            self._opening |= opening
            try:
                opened = await self._open(address, stream, opening)
            finally:
                self._opening -= opening
            if opened is not None:
                await self._run(address, stream, *opened)

    def _is_known(self, incarnation: int) -> bool:
        return incarnation in self._opening or incarnation in self._engine.lanes

    async def _open(
        self, address: str, stream: WorkerStream, opening: set[int]
    ) -> tuple[Lane, Pool] | None:
        """Open a worker's lane; None if discovery was halted meanwhile. Adds the worker's
        incarnation to `opening`, which are among those being opened: it is a new one if another
        shard had the worker."""
        leadership = self._store.leadership
        # This may take as long as the worker's step, so it runs outside the lock.
        worker = await stream.open(leadership.epoch, leadership.holder, self._shard)
        if worker.incarnation not in opening:
            if self._is_known(worker.incarnation):
                raise LaneLost("another worker has started at its address")
            opening.add(worker.incarnation)
            self._opening.add(worker.incarnation)
        async with self._pool_lock:
            return None if self._halting else await self._add_lane(address, stream, worker)

    async def _add_lane(
        self, address: str, stream: WorkerStream, worker: WorkerInfo
    ) -> tuple[Lane, Pool]:
        await self._detached.compact()
        leadership = self._store.leadership
        limits = self._options.limits_for(worker)
        model = self._check_model(worker, limits)
        await self._note_model(model.fingerprint)
        pool = self._store.pool(
            worker.incarnation, worker.num_blocks, self._options.enable_prefix_caching
        )
        first_step = await self._detached.reopen(pool, address, worker.last_finished_step)
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
        self._engine.refused_workers.pop(address, None)
        return lane, pool

    async def _note_model(self, fingerprint: bytes) -> None:
        """Before the first step of another model: end the requests with output of the last one. It
        is named in Redis until they are ended there, so that no later leader continues them."""
        last = self._engine.output_model
        if fingerprint == last:
            return
        if last:
            log.warning("the workers serve another model", was=last.hex(), now=fingerprint.hex())
            self._engine.change_model()
            await self._record_writer.flush()
        await self._store.write_model(fingerprint)
        self._engine.output_model = fingerprint

    async def _run(self, address: str, stream: WorkerStream, lane: Lane, pool: Pool) -> None:
        why = "drained"
        try:
            stream.start(lane.drain, lane.stream_changed)
            await lane.run()
        except LaneLost as error:
            why = str(error)
            lane.mark_suspects(error, self._crashes)
            raise
        except BaseException as error:
            why = str(error) or type(error).__name__
            if isinstance(error, PoolFault):
                self._detached.distrust(pool)
            raise
        finally:
            log.info("worker left", address=address, reason=why)
            # Requeue at once; the pool is handled later.
            lost = self._engine.remove(lane)
            self._detached.add(pool, address, lane.last_step, [*lost, *lane.uncompacted])
            self._wake.set()

    def _check_model(self, worker: WorkerInfo, limits: Limits) -> ModelGeometry:
        """The model that the worker serves; WorkerRefused if another one is served."""
        _require_equal("protocol version", PROTOCOL_VERSION, worker.protocol_version)
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
        model = ModelGeometry(
            worker.model_fingerprint,
            worker.block_size,
            worker.max_model_len,
            worker.kv_cache_dtype,
        )
        served = self._engine.model or model
        _require_equal("model fingerprint", served.fingerprint.hex(), model.fingerprint.hex())
        _require_equal("block size", served.block_size, model.block_size)
        _require_equal("max_model_len", served.max_model_len, model.max_model_len)
        _require_equal("kv_cache_dtype", served.kv_cache_dtype, model.kv_cache_dtype)
        return model


def _require_equal(what: str, served: object, offered: object) -> None:
    if served != offered:
        raise WorkerRefused(f"{what}: the worker has {offered}, the scheduler needs {served}")
