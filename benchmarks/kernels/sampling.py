"""Sampling of tokens and log-probabilities from logits."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from benchmarks.kernels.limits import Limits
from benchmarks.kernels.timing import best_seconds
from benchmarks.report import Cell, Column, Part
from kernels.sampling import SamplingTensors, sample, token_logprobs

_NUM_ROWS, _VOCAB_SIZE = 64, 32_768
_NUM_TOP = 5
_ROUNDS = 10

Row = dict[str, Cell]
OfLogits = Callable[[Tensor], object]


@dataclass(frozen=True)
class How:
    """Sampling parameters, the same for every row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def params(self) -> SamplingTensors:
        return SamplingTensors(
            temperatures=torch.full((_NUM_ROWS,), self.temperature),
            top_ks=torch.full((_NUM_ROWS,), self.top_k),
            top_ps=torch.full((_NUM_ROWS,), self.top_p),
            min_ps=torch.full((_NUM_ROWS,), self.min_p),
            seeds=torch.arange(_NUM_ROWS),
            positions=torch.full((_NUM_ROWS,), 100),
        )


_HOWS = {
    "the most likely token": How(temperature=0.0),
    "any token": How(),
    "top_k 50": How(top_k=50),
    "top_p 0.95": How(top_p=0.95),
    "top_k 50, top_p 0.95": How(top_k=50, top_p=0.95),
    "min_p 0.05": How(min_p=0.05),
}


def sampling(limits: Limits) -> Part:
    batch_bytes = _NUM_ROWS * _VOCAB_SIZE * 4
    num_batches = limits.enough(batch_bytes)
    # As peaked as a model's: the most likely of some ten thousand tokens has a few percent.
    batches = [2.5 * torch.randn(_NUM_ROWS, _VOCAB_SIZE) for _ in range(num_batches)]
    ways = {name: (_ours(how), _torchs(how)) for name, how in _HOWS.items()}
    ways[f"log-probabilities of {_NUM_TOP} and the sampled"] = _our_logprobs, _torchs_logprobs
    return Part(
        name="sampling",
        title="Tokens from logits",
        notes=[
            f"{_NUM_ROWS} rows of {_VOCAB_SIZE:,} logits, new ones each time. *MB* are logits, "
            "read once. *Of limit* is their rate as a share of the rate at which a sum over an "
            "array is read by the same threads. *Torch*: the time of torch's operations over that "
            "of the kernel, with noise from torch's generator, which has one seed for all rows."
        ],
        columns=[
            Column("what", "operation"),
            Column("ms", "ms", ".2f"),
            Column("mb", "MB", ".1f"),
            Column("gbs", "GB/s", ".1f"),
            Column("of_limit", "of limit", ".2f"),
            Column("of_torch", "torch", ".2f"),
        ],
        rows=[_row(limits, name, batches, *both) for name, both in ways.items()],
        targets=[],
    )


def _row(limits: Limits, what: str, batches: list[Tensor], ours: OfLogits, torchs: OfLogits) -> Row:
    mine, others = cycle(batches), cycle(batches)
    seconds = best_seconds(
        {
            "ours": lambda: ours(next(mine)),
            "torch": lambda: torchs(next(others)),
            "limit": limits.read,
        },
        _ROUNDS,
    )
    rate = batches[0].nbytes / seconds["ours"] / 1e9
    return {
        "what": what,
        "ms": 1000 * seconds["ours"],
        "mb": batches[0].nbytes / 1e6,
        "gbs": rate,
        "of_limit": rate / limits.gigabytes_per_s(seconds["limit"]),
        "of_torch": seconds["torch"] / seconds["ours"],
    }


def _ours(how: How) -> OfLogits:
    params = how.params
    return lambda logits: sample(logits, params)


def _torchs(how: How) -> OfLogits:
    """Return the usual sampler in torch: mask filtered tokens, then take the largest quotient of
    probability and exponential noise."""
    if how.temperature == 0:
        return lambda logits: logits.argmax(-1)

    def draw(logits: Tensor) -> Tensor:
        probabilities = _considered(logits / how.temperature, how).softmax(-1)
        return probabilities.div_(torch.empty_like(probabilities).exponential_()).argmax(-1)

    return draw


def _considered(logits: Tensor, how: How) -> Tensor:
    if how.min_p:
        least = logits.amax(-1, keepdim=True) + torch.tensor(how.min_p).log()
        logits = logits.masked_fill(logits < least, float("-inf"))
    if how.top_k:
        least = logits.topk(how.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if how.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        beyond = probabilities.cumsum(-1) - probabilities >= how.top_p
        ordered = ordered.masked_fill(beyond, float("-inf"))
        logits = torch.empty_like(logits).scatter_(-1, order, ordered)
    return logits


def _our_logprobs(logits: Tensor) -> object:
    return token_logprobs(logits, _chosen(), _NUM_TOP)


def _torchs_logprobs(logits: Tensor) -> object:
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, _chosen().unsqueeze(1))
    return logprobs.topk(_NUM_TOP), chosen, (logprobs > chosen).sum(-1)


def _chosen() -> Tensor:
    return torch.arange(_NUM_ROWS)
