"""The load of shards between two reports, against a model that counts."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from gateway_svc.scheduler.shard_choice import ShardLoad
from gateway_svc.scheduler.shard_loads import ShardLoads, ShardReport


@dataclass
class Own:
    is_connected: bool = True
    num_sequences: int = 0
    num_accepted_sequences: int = 0


class OneShard:
    """A shard, this gateway's sequences on it, and those of others."""

    def __init__(self) -> None:
        self.own = Own()
        self.loads = ShardLoads([self.own])
        self.num_others = 0
        self.report()

    def report(self) -> None:
        num_live = self.num_others + self.own.num_accepted_sequences
        self.loads.report(0, [ShardReport(2, num_live)])

    def send(self) -> None:
        self.own.num_sequences += 1

    def accept(self) -> None:
        if self.own.num_accepted_sequences < self.own.num_sequences:
            self.own.num_accepted_sequences += 1

    def end(self) -> None:
        if self.own.num_accepted_sequences:
            self.own.num_accepted_sequences -= 1
            self.own.num_sequences -= 1

    def begin_elsewhere(self) -> None:
        self.num_others += 1


STEPS = (
    OneShard.report,
    OneShard.send,
    OneShard.accept,
    OneShard.end,
    OneShard.begin_elsewhere,
)


@given(st.lists(st.sampled_from(STEPS), max_size=60))
def test_own_sequences_are_always_counted_and_others_since_the_last_report(
    steps: list[object],
) -> None:
    shard = OneShard()
    num_known_others = 0
    for step in steps:
        step(shard)
        if step is OneShard.report:
            num_known_others = shard.num_others
        assert shard.loads[0] == ShardLoad(2, shard.own.num_sequences + num_known_others)


def test_a_shard_without_a_connection_or_a_report_is_not_usable() -> None:
    shards = [Own(), Own(is_connected=False), Own()]
    loads = ShardLoads(shards)
    loads.report(0, [ShardReport(1, 3), ShardReport(1, 4)])
    assert [load.is_usable for load in loads.all()] == [True, False, False]
    shards[1].is_connected = True
    assert loads[1] == ShardLoad(1, 4)


def test_a_shards_own_leader_knows_its_load() -> None:
    loads = ShardLoads([Own(), Own()])
    loads.report(1, [ShardReport(1, 3), ShardReport(1, 4)])
    loads.report(0, [ShardReport(1, 5), ShardReport(1, 1)])
    assert [load.num_live for load in loads.all()] == [5, 4]
