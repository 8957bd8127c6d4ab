"""The rules of block allocation in plain Python: what the scripts must do, id for id."""

from dataclasses import dataclass, field

from scheduler_svc.store.errors import PoolFault
from scheduler_svc.store.types import (
    Admission,
    Commit,
    CommitReply,
    Departure,
    PrefixMatch,
    TokenRun,
)

REMEMBERED_CALLS = 16


@dataclass
class PoolModel:
    """One pool. Every list is in the order that the rules give."""

    num_blocks: int
    step: int = 0
    free: list[int] = field(init=False)
    references: dict[int, int] = field(default_factory=dict)
    hashes: dict[int, bytes] = field(default_factory=dict)
    index: dict[bytes, list[int]] = field(default_factory=dict)
    next_indices: dict[int, int] = field(default_factory=dict)
    published: list[tuple[int, list[int]]] = field(default_factory=list)
    reply: CommitReply | None = None

    def __post_init__(self) -> None:
        self.free = list(range(1, self.num_blocks))

    def open(self, last_finished_step: int) -> int:
        for position, (step, blocks) in enumerate(reversed(self.published)):
            if step <= last_finished_step:
                continue
            # Beyond the remembered calls nobody knows any more which hashes to spare.
            lost = blocks if position < REMEMBERED_CALLS else list(self.hashes)
            for block in lost:
                self._withdraw(block)
        for block in sorted(self.references, reverse=True):
            self._put_back(block)
        self.references, self.next_indices = {}, {}
        self.published, self.reply = [], None
        self.step = max(self.step, last_finished_step) + 1
        return self.step

    def match(self, query: list[bytes]) -> PrefixMatch:
        hits = []
        for block_hash in query:
            if block_hash not in self.index:
                break
            hits.append(self.index[block_hash][0])
        return PrefixMatch(len(hits), sum(block not in self.references for block in hits))

    def commit(self, commit: Commit) -> CommitReply:
        self._validate(commit)
        published: list[int] = []
        for block in commit.withdrawals:
            self._withdraw(block)
        for publication in commit.publications:
            if publication.block_id not in self.hashes:
                self._publish(publication.block_id, publication.block_hash)
                published.append(publication.block_id)
        for run in commit.runs:
            self.next_indices[run.sequence_id] += len(run.token_ids)
        for departure in commit.departures:
            self._depart(departure)
        appended = tuple(self._take(append.num_blocks) for append in commit.appends)
        admitted = tuple(self._admit(admission, published) for admission in commit.admissions)
        if published:
            self.published.append((commit.step, published))
        self.step = commit.step
        self.reply = CommitReply(len(self.free), appended, admitted)
        return self.reply

    def _validate(self, commit: Commit) -> None:
        hashes = {b: h for b, h in self.hashes.items() if b not in commit.withdrawals}
        for publication in commit.publications:
            standing = hashes.setdefault(publication.block_id, publication.block_hash)
            if publication.block_id not in self.references or standing != publication.block_hash:
                raise PoolFault
        self._validate_runs(commit.runs)
        leaving = [departure.sequence_id for departure in commit.departures]
        staying = self.next_indices.keys() - set(leaving)
        given_back = [b for departure in commit.departures for b in departure.block_ids]
        admitted = [admission.sequence_id for admission in commit.admissions]
        num_freed = sum(given_back.count(b) == self.references.get(b) for b in set(given_back))
        if (
            len(set(leaving)) < len(leaving)
            or not self.next_indices.keys() >= set(leaving)
            or any(given_back.count(b) > self.references.get(b, 0) for b in given_back)
            or not staying >= {append.sequence_id for append in commit.appends}
            or sum(a.num_blocks for a in commit.appends) > len(self.free) + num_freed
            or len(set(admitted)) < len(admitted)
            or staying & set(admitted)
        ):
            raise PoolFault

    def _validate_runs(self, runs: tuple[TokenRun, ...]) -> None:
        next_indices = dict(self.next_indices)
        for run in runs:
            if next_indices.get(run.sequence_id) != run.first_index:
                raise PoolFault
            next_indices[run.sequence_id] += len(run.token_ids)

    def _depart(self, departure: Departure) -> None:
        del self.next_indices[departure.sequence_id]
        for block in reversed(departure.block_ids):
            self.references[block] -= 1
            if self.references[block] == 0:
                del self.references[block]
                self._put_back(block)

    def _admit(self, admission: Admission, published: list[int]) -> tuple[int, ...] | None:
        if any(block_hash not in self.index for block_hash in admission.hit_hashes):
            return None
        hits = tuple(self.index[block_hash][0] for block_hash in admission.hit_hashes)
        pinned = [block for block in hits if block not in self.references]
        if len(pinned) + admission.num_new_blocks > len(self.free):
            return None
        for block in pinned:
            self.free.remove(block)
        for block in hits:
            self.references[block] = self.references.get(block, 0) + 1
        taken = self._take(admission.num_new_blocks)
        for block, block_hash in zip(taken, admission.fill_hashes, strict=False):
            self._publish(block, block_hash)
            published.append(block)
        self.next_indices[admission.sequence_id] = admission.num_output_tokens
        return hits + taken

    def _take(self, count: int) -> tuple[int, ...]:
        taken, self.free = tuple(self.free[:count]), self.free[count:]
        for block in taken:
            self._withdraw(block)
            self.references[block] = 1
        return taken

    def _put_back(self, block: int) -> None:
        if block in self.hashes:
            self.free.append(block)
        else:
            self.free.insert(0, block)

    def _publish(self, block: int, block_hash: bytes) -> None:
        self.hashes[block] = block_hash
        self.index.setdefault(block_hash, []).append(block)

    def _withdraw(self, block: int) -> None:
        block_hash = self.hashes.pop(block, None)
        if block_hash is not None:
            self.index[block_hash].remove(block)
            if not self.index[block_hash]:
                del self.index[block_hash]
