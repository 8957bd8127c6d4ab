"""Plans written by hand for sequences with names: shared blocks, copies, swaps."""

from dataclasses import replace

from worker_driver import BLOCK_SIZE, admit, schedule
from worker_driver import Sequence as DriverSequence

from quire.internal.v1 import worker_pb2
from worker_svc.plan.plans import StepOutput, plan_from_proto
from worker_svc.runner.step_runner import StepRunner


class Script:
    """The next plan has all that was called since the last one. Every row has look-ahead, and
    blocks for all of its tokens."""

    def __init__(self, runner: StepRunner, lookahead: int, first_block: int = 1) -> None:
        self._runner = runner
        self._lookahead = lookahead
        self._free = list(range(199, first_block - 1, -1))
        self._plan = worker_pb2.BatchPlan(epoch=1, step=1)
        self._running: dict[str, DriverSequence] = {}
        self._swapped: dict[str, DriverSequence] = {}
        self._num_rows = 0
        self.num_drafts = self.num_accepted = 0

    def tokens(self, name: str) -> list[int]:
        return list((self._running | self._swapped)[name].tokens)

    def block_ids(self, name: str) -> list[int]:
        return list(self._running[name].block_ids)

    def admit(self, name: str, tokens: list[int], num_slots: int, shared: list[int]) -> None:
        """`shared` are blocks whose tokens are computed: the first ones."""
        sequence = DriverSequence(
            self._num_rows, list(tokens), len(tokens), len(shared) * BLOCK_SIZE, list(shared)
        )
        sequence.blocks_for(num_slots, self._free)
        self._admit(name, sequence)

    def fork(self, name: str, new: str) -> None:
        """With the full blocks of a row, and a copy of its last one."""
        source = self._running[name]
        num_full = source.num_computed_tokens // BLOCK_SIZE
        forked = replace(source, tokens=list(source.tokens), block_ids=source.block_ids[:num_full])
        forked.blocks_for(len(source.block_ids) * BLOCK_SIZE, self._free)
        self._plan.copies.sources.append(source.block_ids[num_full])
        self._plan.copies.destinations.append(forked.block_ids[num_full])
        self._admit(new, forked)

    def swap_out(self, name: str) -> None:
        """Release the row, and copy its blocks to the first ones of the host."""
        sequence = self._swapped[name] = self._running.pop(name)
        self._plan.released_rows.append(sequence.row)
        self._plan.swap_outs.sources.extend(sequence.block_ids)
        self._plan.swap_outs.destinations.extend(range(len(sequence.block_ids)))

    def swap_in(self, name: str) -> None:
        """Into other blocks and another row."""
        sequence = self._swapped.pop(name)
        num_blocks = len(sequence.block_ids)
        back = replace(sequence, block_ids=[])
        back.blocks_for(num_blocks * BLOCK_SIZE, self._free)
        self._plan.swap_ins.sources.extend(range(num_blocks))
        self._plan.swap_ins.destinations.extend(back.block_ids)
        self._admit(name, back)

    def step(self) -> None:
        """Run all rows."""
        for sequence in self._running.values():
            schedule(self._plan, sequence.row, len(sequence.tokens) - sequence.num_computed_tokens)
            self._plan.schedule.num_lookahead_tokens.append(self._lookahead)
        self._read(self._runner.launch(plan_from_proto(self._plan)).output())
        self._plan = worker_pb2.BatchPlan(epoch=1, step=self._plan.step + 1)

    def _admit(self, name: str, sequence: DriverSequence) -> None:
        sequence.row = self._num_rows
        self._num_rows += 1
        self._running[name] = sequence
        admit(self._plan, sequence)

    def _read(self, output: StepOutput) -> None:
        assert not output.failures
        by_row = {sequence.row: sequence for sequence in self._running.values()}
        for sequence in by_row.values():
            # Unless the output says how far it came.
            sequence.num_computed_tokens = len(sequence.tokens)
        for row, token in zip(output.sampled_rows, output.sampled_token_ids, strict=True):
            by_row[row].tokens.append(token)
        counts = zip(output.lookahead_rows, output.num_computed_tokens, strict=True)
        for row, num_computed in counts:
            by_row[row].num_computed_tokens = num_computed
        self.num_drafts += sum(output.num_draft_tokens)
        self.num_accepted += sum(output.num_accepted_tokens)
