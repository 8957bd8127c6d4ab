"""What all shards of one scheduler process share."""

from dataclasses import dataclass

from quire.service.tracing.spans import SpanExporter
from scheduler_svc.cluster.membership import Membership
from scheduler_svc.cluster.worker_addresses import WorkerAddresses
from scheduler_svc.operations.step_histograms import StepHistograms
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.cluster import ClusterStore
from scheduler_svc.store.id_directory import IdDirectory
from scheduler_svc.store.retry import RedisRetry
from scheduler_svc.store.store import Store


@dataclass(frozen=True)
class Process:
    settings: SchedulerSettings
    # Where gateways and other schedulers reach it.
    address: str
    membership: Membership
    addresses: WorkerAddresses
    cluster: ClusterStore
    directory: IdDirectory
    # Of calls to Redis.
    retry: RedisRetry
    # By shard, of all shards.
    stores: dict[int, Store]
    steps: StepHistograms
    # Takes the spans of requests; None: requests are not traced.
    spans: SpanExporter | None
