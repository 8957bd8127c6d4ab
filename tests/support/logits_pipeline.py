"""The logits processors of a worker, called by hand."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.dispatch import Implementation, choose
from quire.internal.v1 import worker_pb2
from worker_svc.logits.built_in import ProcessorFactory, make_pipeline
from worker_svc.logits.pipeline import LogitsPipeline
from worker_svc.logits.processor import ProcessorContext
from worker_svc.plan.logits_params import LogitsParams
from worker_svc.plan.plans import Admission, Plan, plan_from_proto

MAX_NUM_SEQS = 40


def context(
    vocab_size: int, implementation: Implementation | None = None, device: str = "cpu"
) -> ProcessorContext:
    def upload(array: NDArray[Any]) -> Tensor:
        return torch.tensor(array, device=device)

    return ProcessorContext(
        vocab_size=vocab_size,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=500,
        device=torch.device(device),
        implementation=implementation or choose(device, ()),
        upload=upload,
    )


def pipeline(
    vocab_size: int,
    implementation: Implementation | None = None,
    own: Mapping[str, ProcessorFactory] | None = None,
    device: str = "cpu",
) -> LogitsPipeline:
    return make_pipeline(context(vocab_size, implementation, device), own)


def changes(admissions: Sequence[Admission] = (), released: Sequence[int] = ()) -> Plan:
    """A plan that runs nothing."""
    plan = plan_from_proto(worker_pb2.BatchPlan(released_rows=released))
    return Plan(**{**vars(plan), "admissions": tuple(admissions)})


def admission(
    row: int,
    params: LogitsParams | None,
    prompt: Sequence[int],
    output: Sequence[int] = (),
    temperature: float = 1.0,
) -> Admission:
    return Admission(
        row=row,
        token_ids=np.array([*prompt, *output], np.int64),
        num_prompt_tokens=len(prompt),
        num_computed_tokens=0,
        block_ids=np.empty(0, np.int64),
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        num_logprobs=0,
        num_prompt_logprobs=0,
        logits_params=params,
    )


def append(processors: LogitsPipeline, rows: Sequence[int], tokens: Sequence[int]) -> None:
    """A token of each row, as both kinds of processors get it."""
    places, token_ids = np.array(rows, np.int64), torch.tensor(tokens, dtype=torch.int64)
    processors.append_on_device(places, token_ids)
    processors.append_on_host(places, token_ids)
