"""Starts the ranks of a worker, or joins those that torchrun started, as rank 0."""

from dataclasses import dataclass

from torch.distributed.distributed_c10d import Store

from worker_svc.errors import WrongSettingError
from worker_svc.ranks.agreement import report_failure
from worker_svc.ranks.group import RankGroup, end_process
from worker_svc.ranks.heartbeats import HeartbeatMonitor
from worker_svc.ranks.leader import Leader
from worker_svc.ranks.processes import FollowerProcesses
from worker_svc.ranks.rendezvous import LOOPBACK, Place, own_place
from worker_svc.settings import WorkerSettings


@dataclass
class LeadingRanks:
    """The ranks of a worker, seen by rank 0. It ends with this process's end, and the process ends
    when a rank is lost."""

    group: RankGroup
    leader: Leader
    _store: Store  # listens as long as this object is there
    _monitor: HeartbeatMonitor
    _processes: FollowerProcesses | None  # None where torchrun has started them

    def watch(self) -> None:
        """To be called when all ranks are ready: notice soon one that is silent."""
        self._monitor.expect_passes()

    def close(self) -> None:
        """Let the followers end. To be called after the last pass."""
        if self._processes is not None:
            self._processes.expect_end()
        # Meanwhile watched: it waits for ranks to receive that, and one may be silent.
        self.leader.stop()
        self._monitor.stop()
        if self._processes is not None:
            self._processes.stop()

    def abort(self, error: BaseException) -> None:
        """As `close` where this rank has not loaded the model, for this reason."""
        self._monitor.stop()
        if self._processes is None:
            report_failure(self.group, error)
        else:
            self._processes.kill()


def start_ranks(settings: WorkerSettings) -> LeadingRanks:
    """Start the other ranks on this machine, unless this process was started as one of several.
    Return before the others are there: all load their shards at once. WrongSettingError as in
    `own_place`, and for another rank than 0."""
    place = own_place(settings)
    if place is not None:
        if place.rank != 0:
            raise WrongSettingError(f"RANK is {place.rank}, but rank 0 has to be the worker")
        return _lead(settings, place, place.store(is_server=True), None)
    unbound = Place(0, settings.num_ranks, LOOPBACK, 0)
    store = unbound.listen()
    place = Place(0, settings.num_ranks, LOOPBACK, store.port)
    processes = FollowerProcesses(settings, place.size, place.port, end_process)
    return _lead(settings, place, store, processes)


def _lead(
    settings: WorkerSettings, place: Place, store: Store, processes: FollowerProcesses | None
) -> LeadingRanks:
    group = RankGroup(
        store, 0, place.size, place.interface(), num_stages=settings.pipeline_parallel_size
    )
    monitor = HeartbeatMonitor(place.store(), place.size, end_process)
    monitor.start()
    return LeadingRanks(group, Leader(group), store, monitor, processes)
