"""What a step on a GPU needs on every rank of a worker."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker_svc.gpu.device_inputs import Arrays
from worker_svc.plan.inputs import Ints


@dataclass(frozen=True)
class StepArrays:
    """The inputs of a step on the host, and how it is run."""

    forward: Arrays  # of `ForwardInputs`, padding included
    blocks: Arrays  # of `BlockChanges`
    logits_indices: Ints  # into the tokens of the batch
    prompt_indices: Ints  # the same for prompts' log-probabilities; none if no row requests them
    num_tokens: int  # without padding; 0: no pass
    graph_size: int  # 0: without a graph
    max_query_len: int
    max_seq_len: int

    @property
    def is_empty(self) -> bool:
        """Whether no rank has anything to do."""
        return not self.num_tokens and not len(self.blocks["table_indices"])


class Followers(Protocol):
    """The other ranks, which run every pass of rank 0 with it."""

    def send_step(self, step: StepArrays) -> None:
        """To be called before rank 0 runs the step."""
        ...

    def in_step(self) -> AbstractContextManager[None]:
        """For sending a step and running its pass: a failure is that of the worker."""
        ...

    def share_ids(self, ids: Tensor) -> None:
        """Give the others the input ids, of which the host does not know those that are still being
        sampled. On the device, within a pass."""
        ...
