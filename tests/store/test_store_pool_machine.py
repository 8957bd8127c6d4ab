"""Random steps on a real Redis against the plain model: same ids, same order, nothing lost."""

import asyncio
import secrets
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
from store_pool_model import PoolModel

from scheduler_svc.store.errors import PoolFault, WrongStep
from scheduler_svc.store.hashing import HashChain, root_hash
from scheduler_svc.store.store import Store
from scheduler_svc.store.types import (
    Admission,
    Append,
    Commit,
    CommitReply,
    Departure,
    Publication,
    TokenRun,
)

# Blocks of one token out of two: chains meet often.
CONTENTS = st.lists(st.integers(0, 1), max_size=4)


def chain(contents: list[int]) -> list[bytes]:
    hashes = HashChain(root_hash(b"model"), block_size=1)
    hashes.extend(contents)
    return list(hashes.hashes)


@dataclass
class Running:
    """A sequence as the scheduler knows it."""

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

    @initialize(num_blocks=st.integers(2, 16))
    def create(self, num_blocks: int) -> None:
        self.pool = self.store.pool(secrets.randbits(64), num_blocks)
        self.model = PoolModel(num_blocks)
        self.running: dict[int, Running] = {}
        self.admitted_contents: dict[int, list[int]] = {}
        self.next_id = 0
        self.last: Commit | None = None
        assert self.runner.run(self.pool.open(0)) == self.model.open(0)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.runner.run(self.pool.drop())

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        leaving = [s for s in self.running.values() if data.draw(st.integers(0, 3)) == 0]
        staying = [s for s in self.running.values() if s not in leaving]
        for sequence in staying:
            missing = len(sequence.table) - len(sequence.contents)
            sequence.contents += data.draw(st.lists(st.integers(0, 1), max_size=missing))
        publications = [p for s in staying for p in s.publications()]
        held = sorted(self.model.references) or [0]
        commit = Commit(
            step=self.model.step + 1,
            withdrawals=tuple(data.draw(st.lists(st.sampled_from(held), max_size=1))),
            publications=tuple(publications),
            runs=tuple(self._run(s, data) for s in self.running.values()),
            departures=tuple(Departure(s.sequence_id, tuple(s.table)) for s in leaving),
            appends=tuple(
                Append(s.sequence_id, count)
                for s in staying
                if (count := data.draw(st.integers(0, 2)))
            ),
            admissions=tuple(self._admissions(data)),
        )
        reply = self._expect(commit)
        if reply is not None:
            self.last = commit
            self._apply(commit, reply, staying)

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
        runs = [self._run(s, data, skip=1) for s in self.running.values()]
        if runs:
            self._expect(Commit(self.model.step + 1, runs=tuple(runs)))

    @rule(queries=st.lists(CONTENTS, max_size=3))
    def match(self, queries: list[list[int]]) -> None:
        chains = [chain(contents) for contents in queries]
        expected = [self.model.match(query) for query in chains]
        assert self.runner.run(self.pool.match(chains)) == expected

    @rule(unfinished=st.sampled_from([0, 1, 2, 3, 30]))
    def reopen(self, unfinished: int) -> None:
        finished = max(0, self.model.step - unfinished)
        self.running, self.last = {}, None
        assert self.runner.run(self.pool.open(finished)) == self.model.open(finished)

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

    def _run(self, sequence: Running, data: st.DataObject, skip: int = 0) -> TokenRun:
        tokens = tuple(data.draw(st.lists(st.integers(0, 2**32 - 1), max_size=2)))
        first = sequence.num_output_tokens + skip
        return TokenRun(sequence.sequence_id, first, tokens)

    def _admissions(self, data: st.DataObject) -> list[Admission]:
        """Some count on hits that are there, some on what the plan fills, some on nothing."""
        admissions = []
        for contents in data.draw(st.lists(CONTENTS, max_size=3)):
            hashes = chain(contents)
            cached = self.model.match(hashes).num_hits
            num_hits = data.draw(st.sampled_from([cached, len(hashes), 0]))
            admissions.append(
                Admission(
                    sequence_id=self.next_id,
                    num_output_tokens=data.draw(st.integers(0, 5)),
                    hit_hashes=tuple(hashes[:num_hits]),
                    num_new_blocks=len(hashes) - num_hits + 1,
                    fill_hashes=tuple(hashes[num_hits:]),
                )
            )
            self.admitted_contents[self.next_id] = contents
            self.next_id += 1
        return admissions

    def _apply(self, commit: Commit, reply: CommitReply, staying: list[Running]) -> None:
        for run in commit.runs:
            self.running[run.sequence_id].num_output_tokens += len(run.token_ids)
        for departure in commit.departures:
            del self.running[departure.sequence_id]
        for sequence in staying:
            sequence.published = set(range(len(sequence.contents)))
        for append, blocks in zip(commit.appends, reply.appended, strict=True):
            self.running[append.sequence_id].table += blocks
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
        PoolMachine.store = runner.run(Store.connect(redis_url))
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


def test_pool_does_what_the_rules_say(redis_url: str) -> None:
    _run_machine(redis_url, max_examples=30, stateful_step_count=25, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_pool_does_what_the_rules_say_for_long(redis_url: str) -> None:
    _run_machine(redis_url, max_examples=500, stateful_step_count=60)
