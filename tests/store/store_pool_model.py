"""The rules of block allocation in plain Python: what the scripts must do, id for id."""

from collections import Counter
from dataclasses import dataclass, field

from scheduler_svc.store.errors import PoolFault
from scheduler_svc.store.types import (
    Admission,
    Commit,
    CommitReply,
    PrefixMatch,
    TokenRanges,
)

REMEMBERED_CALLS = 16


@dataclass
class PoolModel:
    """One pool. Every list is in the order that the scripts keep."""

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

    def open(self, last_finished_step: int, leader_step: int = 0) -> int:
        max_seen_step = max(last_finished_step, leader_step)
        if self.step < max_seen_step:
            self.reset()
        for position, (step, blocks) in enumerate(reversed(self.published)):
            if step <= last_finished_step:
                continue
            # Beyond the remembered calls it is unknown which hashes to keep.
            lost = blocks if position < REMEMBERED_CALLS else list(self.hashes)
            for block in lost:
                self._withdraw(block)
        for block in sorted(self.references, reverse=True):
            self._put_back(block)
        self.references, self.next_indices = {}, {}
        self.published, self.reply = [], None
        self.step = max(self.step, max_seen_step) + 1
        return self.step

    def match(self, query: list[bytes]) -> PrefixMatch:
        hits = []
        for block_hash in query:
            if block_hash not in self.index:
                break
            hits.append(self.index[block_hash][0])
        return PrefixMatch(len(hits), sum(block not in self.references for block in hits))

    def reset(self) -> int:
        num_hashes = len(self.hashes)
        self.hashes, self.index = {}, {}
        return num_hashes

    def commit(self, commit: Commit) -> CommitReply:
        self._validate(commit)
        published: list[int] = []
        for block in commit.withdrawals:
            self._withdraw(block)
        for publication in commit.publications:
            if publication.block_id not in self.hashes:
                self._publish(publication.block_id, publication.block_hash)
                published.append(publication.block_id)
        self.next_indices |= zip(
            commit.token_ranges.sequence_ids, commit.token_ranges.next_indices, strict=True
        )
        for sequence_id in commit.removed:
            self.next_indices.pop(sequence_id, None)
        for block in commit.shared_blocks:
            self.references[block] += 1
        for block in commit.returned_blocks:
            self._give_back(block)
        taken = tuple(self._take(count) for count in commit.taken_references)
        self.next_indices |= {j.sequence_id: j.num_output_tokens for j in commit.added}
        admitted = tuple(self._admit(admission, published) for admission in commit.admissions)
        if published:
            self.published.append((commit.step, published))
        self.step = commit.step
        self.reply = CommitReply(len(self.free), taken, admitted)
        return self.reply

    def _validate(self, commit: Commit) -> None:
        hashes = {b: h for b, h in self.hashes.items() if b not in commit.withdrawals}
        for publication in commit.publications:
            standing = hashes.setdefault(publication.block_id, publication.block_hash)
            if publication.block_id not in self.references or standing != publication.block_hash:
                raise PoolFault
        self._validate_ranges(commit.token_ranges)
        references = Counter(self.references)
        references.update(commit.shared_blocks)
        references.subtract(commit.returned_blocks)
        num_freed = sum(references[block] == 0 for block in self.references)
        joining = [entry.sequence_id for entry in (*commit.added, *commit.admissions)]
        if (
            not self.references.keys() >= set(commit.shared_blocks)
            or min(references.values(), default=0) < 0
            or len(commit.taken_references) > len(self.free) + num_freed
            or len(set(joining)) < len(joining)
            or (self.next_indices.keys() - set(commit.removed)) & set(joining)
        ):
            raise PoolFault

    def _validate_ranges(self, ranges: TokenRanges) -> None:
        next_indices = dict(self.next_indices)
        intervals = zip(ranges.sequence_ids, ranges.first_indices, ranges.next_indices, strict=True)
        for sequence_id, first, following in intervals:
            if next_indices.get(sequence_id) != first:
                raise PoolFault
            next_indices[sequence_id] = following

    def _admit(self, admission: Admission, published: list[int]) -> tuple[int, ...] | None:
        if any(block_hash not in self.index for block_hash in admission.hit_hashes):
            return None
        hits = tuple(self.index[block_hash][0] for block_hash in admission.hit_hashes)
        free_hits = [block for block in hits if block not in self.references]
        if len(free_hits) + admission.num_new_blocks > len(self.free):
            return None
        for block in free_hits:
            self.free.remove(block)
        for block in hits:
            self.references[block] = self.references.get(block, 0) + 1
        taken = tuple(self._take(1) for _ in range(admission.num_new_blocks))
        for block, block_hash in zip(taken, admission.fill_hashes, strict=False):
            self._publish(block, block_hash)
            published.append(block)
        self.next_indices[admission.sequence_id] = admission.num_output_tokens
        return hits + taken

    def _take(self, num_references: int) -> int:
        block = self.free.pop(0)
        self._withdraw(block)
        self.references[block] = num_references
        return block

    def _give_back(self, block: int) -> None:
        self.references[block] -= 1
        if self.references[block] == 0:
            del self.references[block]
            self._put_back(block)

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
