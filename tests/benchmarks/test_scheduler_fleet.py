"""When a fleet is ready for its load: no shard is handed over any more."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from benchmarks.scheduler.fleet import Fleet, FleetSetting, read_owners
from benchmarks.scheduler.workload import Workload
from quire.launcher.redis import EmbeddedRedis
from scheduler_svc.cluster.cluster_map import ClusterMap
from scheduler_svc.store.cluster import ClusterStore
from scheduler_svc.store.keys import ClusterKeys

_MODEL = {
    "max_model_len": 64,
    "block_size": 16,
    "num_blocks": 64,
    "max_num_seqs": 4,
    "step_ms": 10.0,
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path) as server:
        yield server


def test_owners_are_those_of_the_map(server: EmbeddedRedis) -> None:
    async def write_heartbeat() -> None:
        store = ClusterStore.at(server.url)
        try:
            await store.beat("a", "unix:one", 1000, {})
        finally:
            await store.close()

    with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
        assert read_owners(client) == []
        asyncio.run(write_heartbeat())
        written = ClusterMap(version=1, num_shards=3, owners={0: "a", 1: "ended"})
        client.set(ClusterKeys().map, written.pack())
        assert read_owners(client) == ["unix:one", "", ""]


@pytest.mark.slow
def test_a_fleet_is_led_as_its_map_says() -> None:
    setting = FleetSetting(num_workers=4, num_shards=2, num_schedulers=2, model=_MODEL)
    with Fleet(setting) as fleet:
        view = fleet.view
        assert [shard.leader for shard in view.shards] == read_owners(fleet.redis)
        assert len(view.leaders) == 2


@pytest.mark.slow
def test_requests_that_move_to_another_shard_are_followed() -> None:
    setting = FleetSetting(num_workers=2, num_shards=2, num_schedulers=2, model=_MODEL)
    workload = Workload(num_requests=8, concurrency=8, prompt_tokens=(8, 8), output_tokens=(56, 56))
    with Fleet(replace(setting, model={**_MODEL, "step_ms": 100.0})) as fleet:
        # All to a shard with four rows.
        fleet.run(workload, [1, 0])
        found = fleet.wait_for("started", 8, 30.0)
        assert found["moved"] == 4
        assert fleet.wait_for("ended", 8, 30.0)["tokens"] == 8 * 56
