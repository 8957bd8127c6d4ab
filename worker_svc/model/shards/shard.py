"""Which part of a model a rank has."""

from dataclasses import dataclass

from worker_svc.model.stages.stage import Stage


@dataclass(frozen=True)
class Shard:
    """One of `count` equal parts of a model, or of a stage of it."""

    index: int
    count: int
    stage: Stage | None = None  # None: all layers

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def equal_part(self, size: int) -> range:
        """Of `size` numbers, which `count` divides."""
        part = size // self.count
        return range(self.index * part, (self.index + 1) * part)

    def kv_heads(self, num_kv_heads: int) -> range:
        """The key and value heads of this shard's queries. Where there are fewer than shards,
        several shards have the same one."""
        if num_kv_heads % self.count == 0:
            return self.equal_part(num_kv_heads)
        head = self.index * num_kv_heads // self.count
        return range(head, head + 1)

    def rows(self, vocab_size: int) -> range:
        """Tokens of the vocabulary. All shards have as many; the last ones may be beyond its
        end."""
        part = -(-vocab_size // self.count)
        return range(self.index * part, (self.index + 1) * part)
