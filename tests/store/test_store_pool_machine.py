"""Random steps on a real Redis against the plain model: same ids, same order, nothing lost."""

import asyncio
import secrets
from array import array
from copy import deepcopy
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis.asyncio import Redis
from store_pool_model import PoolModel

from scheduler_svc.store.errors import PoolFault, WrongStep
from scheduler_svc.store.hashing import HashChain, root_hash
from scheduler_svc.store.keys import ShardKeys
from scheduler_svc.store.store import Store
from scheduler_svc.store.types import (
    Admission,
    Commit,
    CommitReply,
    ForkedSequence,
    Publication,
    TokenRanges,
)

KEYS = ShardKeys(0)

# Blocks of one token out of two: equal chains are frequent.
CONTENTS = st.lists(st.integers(0, 1), max_size=4)


def chain(contents: list[int]) -> list[bytes]:
    hashes = HashChain(root_hash(b"model"), block_size=1)
    hashes.extend_to(array("I", contents))
    return list(hashes.hashes)


@dataclass
class Running:
    """A sequence as the scheduler has it."""

    sequence_id: int
    contents: list[int]  # of its full blocks
    table: list[int]
    num_output_tokens: int = 0
    published: set[int] = field(default_factory=set)  # positions in the table

    def publications(self) -> list[Publication]:
        known = zip(self.table, chain(self.contents), strict=False)
        return [
            Publication(block, block_hash)
            for position, (block, block_hash) in enumerate(known)
            if position not in self.published
        ]


class PoolMachine(RuleBasedStateMachine):
    """One pool, one scheduler."""

    runner: ClassVar[asyncio.Runner]
    store: ClassVar[Store]
    redis: ClassVar[Redis]

    @initialize(num_blocks=st.integers(2, 16))
    def create(self, num_blocks: int) -> None:
        self.pool = self.store.pool(secrets.randbits(64), num_blocks)
        self.model = PoolModel(num_blocks)
        self.running: dict[int, Running] = {}
        self.preempted: dict[int, Running] = {}  # without blocks; late tokens may still arrive
        self.admitted_contents: dict[int, list[int]] = {}
        self.next_id = 0
        self.last: Commit | None = None
        self.saved: tuple[dict[str, bytes | None], PoolModel] | None = None
        assert self.runner.run(self.pool.open(0)) == self.model.open(0)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.runner.run(self.pool.drop())

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Sequences end, are preempted, grow, fork and are admitted; late tokens arrive."""
        fates = {
            s.sequence_id: data.draw(st.sampled_from(["end", "preempt", *["stay"] * 5]))
            for s in self.running.values()
        }
        ended = [s for s in self.running.values() if fates[s.sequence_id] != "stay"]
        ending = [s for s in self.running.values() if fates[s.sequence_id] == "end"]
        staying = [s for s in self.running.values() if fates[s.sequence_id] == "stay"]
        late = [s for s in self.preempted.values() if data.draw(st.booleans())]
        forgotten = [*ending, *(s for s in late if data.draw(st.booleans()))]
        for sequence in staying:
            missing = len(sequence.table) - len(sequence.contents)
            sequence.contents += data.draw(st.lists(st.integers(0, 1), max_size=missing))
        appended = [s for s in staying for _ in range(data.draw(st.integers(0, 2)))]
        forks, joined = self._forks(staying, data)
        held = sorted(self.model.references) or [0]
        commit = Commit(
            step=self.model.step + 1,
            withdrawals=data.draw(st.lists(st.sampled_from(held), max_size=1)),
            publications=[p for s in staying for p in s.publications()],
            token_ranges=self._ranges([*self.running.values(), *late], data),
            removed=[s.sequence_id for s in forgotten],
            shared_blocks=[block for fork in forks for block in fork.table],
            returned_blocks=[block for s in ended for block in reversed(s.table)],
            taken_references=[1] * (len(appended) + len(forks)),
            added=joined,
            admissions=self._admissions(forgotten, data),
        )
        reply = self._expect(commit)
        if reply is not None:
            self.last = commit
            self._apply(commit, reply, staying, appended, forks)

    @precondition(lambda self: self.last is not None)
    @rule()
    def repeat(self) -> None:
        assert self.last is not None
        assert self.runner.run(self.pool.commit(self.last)) == self.model.reply

    @rule(ahead=st.sampled_from([-2, 2, 100]))
    def wrong_step(self, ahead: int) -> None:
        with pytest.raises(WrongStep):
            self.runner.run(self.pool.commit(Commit(self.model.step + ahead)))

    @rule(data=st.data())
    def gap_in_the_journal(self, data: st.DataObject) -> None:
        ranges = self._ranges(list(self.running.values()), data, skip=1)
        if ranges.sequence_ids:
            self._expect(Commit(self.model.step + 1, token_ranges=ranges))

    @rule(count=st.integers(1, 3))
    def group_block(self, count: int) -> None:
        """Take a block with several references, and return them in the next call."""
        if not self.model.free:
            return
        reply = self._expect(Commit(self.model.step + 1, taken_references=[count]))
        assert reply is not None
        self.last = Commit(self.model.step + 1, returned_blocks=[*reply.taken] * count)
        assert self._expect(self.last) is not None

    @rule(block=st.integers(0, 16))
    def block_that_may_not_be_held(self, block: int) -> None:
        count = self.model.references.get(block, 0)
        too_many = [block] * (count + 1)
        self._expect(Commit(self.model.step + 1, returned_blocks=too_many))
        if count == 0:
            self._expect(Commit(self.model.step + 1, shared_blocks=[block]))

    @rule()
    def reset(self) -> None:
        assert self.runner.run(self.pool.reset_prefix_cache()) == self.model.reset()

    @rule(queries=st.lists(CONTENTS, max_size=3))
    def match(self, queries: list[list[int]]) -> None:
        chains = [chain(contents) for contents in queries]
        expected = [self.model.match(query) for query in chains]
        assert self.runner.run(self.pool.match(chains)) == expected

    @rule(unfinished=st.sampled_from([0, 1, 2, 3, 30]))
    def reopen(self, unfinished: int) -> None:
        finished = max(0, self.model.step - unfinished)
        self._reopen(finished, leader_step=0)

    @rule()
    def snapshot(self) -> None:
        """Redis writes its file."""
        self.saved = self.runner.run(self._dump()), deepcopy(self.model)

    @precondition(lambda self: self.saved is not None)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        """Restart Redis from its file, then reopen the pool with the newer known step."""
        assert self.saved is not None
        dumped, model = self.saved
        step = self.model.step
        self.model = deepcopy(model)
        self.runner.run(self._restore(dumped))
        self._reopen(data.draw(st.integers(0, step)), data.draw(st.integers(0, step)))

    def _reopen(self, finished: int, leader_step: int) -> None:
        self.running, self.preempted, self.last = {}, {}, None
        step = self.runner.run(self.pool.open(finished, leader_step))
        assert step == self.model.open(finished, leader_step)

    async def _dump(self) -> dict[str, bytes | None]:
        return {key: await self.redis.dump(key) for key in KEYS.pool(self.pool.incarnation).all}

    async def _restore(self, dumped: dict[str, bytes | None]) -> None:
        await self.redis.delete(*dumped)
        for key, value in dumped.items():
            if value is not None:
                await self.redis.restore(key, 0, value)

    @invariant()
    def redis_holds_what_the_model_holds(self) -> None:
        if not hasattr(self, "pool"):
            return
        audit = self.runner.run(self.pool.audit())  # conservation is checked in there
        assert audit.free_order == tuple(self.model.free)
        assert audit.references == self.model.references
        assert audit.hashes == self.model.hashes
        assert audit.index == {h: tuple(blocks) for h, blocks in self.model.index.items()}
        assert audit.next_indices == self.model.next_indices
        assert audit.step == self.model.step

    def _expect(self, commit: Commit) -> CommitReply | None:
        """The reply, which is the model's; None where both refuse."""
        try:
            expected = self.model.commit(commit)
        except PoolFault:
            with pytest.raises(PoolFault):
                self.runner.run(self.pool.commit(commit))
            return None
        assert self.runner.run(self.pool.commit(commit)) == expected
        return expected

    def _ranges(self, sequences: list[Running], data: st.DataObject, skip: int = 0) -> TokenRanges:
        ranges = TokenRanges()
        for sequence in sequences:
            tokens = data.draw(st.lists(st.integers(0, 2**32 - 1), max_size=2))
            first = sequence.num_output_tokens + skip
            ranges.sequence_ids.append(sequence.sequence_id)
            ranges.first_indices.append(first)
            ranges.next_indices.append(first + len(tokens))
            ranges.token_ids.extend(tokens)
        return ranges

    def _forks(
        self, staying: list[Running], data: st.DataObject
    ) -> tuple[list[Running], list[ForkedSequence]]:
        """Children that share all full blocks of a parent but the last one in its table."""
        forks = []
        for parent in staying:
            if data.draw(st.integers(0, 5)) == 0:
                num_shared = min(len(parent.contents), len(parent.table) - 1)
                fork = Running(
                    self.next_id,
                    parent.contents[:num_shared],
                    parent.table[:num_shared],
                    data.draw(st.integers(0, 5)),
                    set(range(num_shared)),
                )
                forks.append(fork)
                self.next_id += 1
        return forks, [ForkedSequence(fork.sequence_id, fork.num_output_tokens) for fork in forks]

    def _admissions(self, forgotten: list[Running], data: st.DataObject) -> list[Admission]:
        """Some expect cached blocks, some blocks that the plan fills, some none."""
        admissions = []
        again = [s.sequence_id for s in forgotten if data.draw(st.booleans())]
        for contents in data.draw(st.lists(CONTENTS, max_size=3)):
            hashes = chain(contents)
            cached = self.model.match(hashes).num_hits
            sequence_id = again.pop() if again else self.next_id
            self.next_id += sequence_id == self.next_id
            num_hits = data.draw(st.sampled_from([cached, len(hashes), 0]))
            admissions.append(
                Admission(
                    sequence_id=sequence_id,
                    num_output_tokens=data.draw(st.integers(0, 5)),
                    hit_hashes=tuple(hashes[:num_hits]),
                    num_new_blocks=len(hashes) - num_hits + 1,
                    fill_hashes=tuple(hashes[num_hits:]),
                )
            )
            self.admitted_contents[sequence_id] = contents
        return admissions

    def _apply(
        self,
        commit: Commit,
        reply: CommitReply,
        staying: list[Running],
        appended: list[Running],
        forks: list[Running],
    ) -> None:
        sequences = self.running | self.preempted
        for sequence_id, following in zip(
            commit.token_ranges.sequence_ids, commit.token_ranges.next_indices, strict=True
        ):
            sequences[sequence_id].num_output_tokens = following
        for sequence in staying:
            sequence.published = set(range(len(sequence.contents)))
        for owner, block in zip((*appended, *forks), reply.taken, strict=True):
            owner.table.append(block)
        self.running = {s.sequence_id: s for s in (*staying, *forks)}
        self.preempted = {
            sequence_id: sequence
            for sequence_id, sequence in sequences.items()
            if sequence_id not in self.running and sequence_id not in commit.removed
        }
        for admission, table in zip(commit.admissions, reply.admitted, strict=True):
            if table is not None:
                contents = self.admitted_contents[admission.sequence_id]
                self.running[admission.sequence_id] = Running(
                    admission.sequence_id,
                    list(contents),
                    list(table),
                    admission.num_output_tokens,
                    set(range(len(contents))),
                )


def _run_machine(redis_url: str, **profile: object) -> None:
    with asyncio.Runner() as runner:
        PoolMachine.runner = runner
        PoolMachine.store = Store.at(redis_url)
        PoolMachine.redis = Redis.from_url(redis_url)
        runner.run(PoolMachine.store.lease.acquire("", lease_ms=3000))
        try:
            run_state_machine_as_test(
                PoolMachine,
                settings=settings(
                    deadline=None,
                    database=None,
                    suppress_health_check=list(HealthCheck),
                    **profile,  # type: ignore[arg-type]
                ),
            )
        finally:
            runner.run(PoolMachine.store.close())
            runner.run(PoolMachine.redis.aclose())


def test_the_pool_matches_the_model(redis_url: str) -> None:
    _run_machine(redis_url, max_examples=30, stateful_step_count=25, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_pool_matches_the_model_for_long(redis_url: str) -> None:
    _run_machine(redis_url, max_examples=500, stateful_step_count=60)
