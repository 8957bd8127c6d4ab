"""Measures only the matrix products of the work.

Three figures: the time of the products of exactly the runner's steps, with its kernel, on weights
with the model's shapes; and the rates (FLOP/s) of one step with the full token budget, in float32,
by torch and by that kernel.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from benchmarks.engines.batcher import steps as batched_steps
from benchmarks.engines.child import job, serve
from benchmarks.engines.models import MODELS, BenchModel
from benchmarks.engines.workload import MAX_NUM_SEQS, Work
from kernels.dispatch import cpp_implementations
from kernels.linear import PackedWeight, linear
from worker_svc.service.process import keep_freed_memory, prepare_memory
from worker_svc.settings import WorkerSettings

_NUM_RATES = 5
_MANY_BLOCKS = 1_000_000


class Products:
    """Weights with a model's shapes, separate for each layer, multiplied by the runner's kernel."""

    def __init__(self, model: BenchModel) -> None:
        self._model = model
        self._layers = [
            [_Weight(inputs, outputs) for inputs, outputs in model.products]
            for _ in range(model.num_hidden_layers)
        ]
        self._head = _Weight(model.hidden_size, model.vocab_size)
        self._inputs: dict[tuple[int, int], Tensor] = {}

    def step(self, num_tokens: int, num_sampled: int) -> None:
        for layer in self._layers:
            for weight in layer:
                weight.multiply(self._input(num_tokens, weight.num_inputs))
        self._head.multiply(self._input(num_sampled, self._head.num_inputs))

    def rate(self, num_tokens: int) -> float:
        """Return the operations per second of a step with `num_tokens` tokens."""
        return self._rate(num_tokens, lambda: self.step(num_tokens, 1))

    def torch_rate(self, num_tokens: int) -> float:
        """Return the same for torch. Layers share weights; with this many tokens, reading them from
        memory does not matter."""
        weights = [torch.randn(outputs, inputs) for inputs, outputs in self._model.products]
        head = torch.randn(self._model.vocab_size, self._model.hidden_size)

        def step() -> None:
            for _ in self._layers:
                for weight in weights:
                    torch_linear(self._input(num_tokens, weight.shape[1]), weight)
            torch_linear(self._input(1, head.shape[1]), head)

        # Warm the caches.
        step()
        return self._rate(num_tokens, step)

    def _rate(self, num_tokens: int, step: Callable[[], None]) -> float:
        times_s = [_timed_s(step) for _ in range(_NUM_RATES)]
        return self._model.flops(num_tokens, 1) / median(times_s)

    def _input(self, num_rows: int, num_features: int) -> Tensor:
        shape = (num_rows, num_features)
        if shape not in self._inputs:
            self._inputs[shape] = torch.randn(shape)
        return self._inputs[shape]


class _Weight:
    """One weight in the runner's layout."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        self.num_inputs = num_inputs
        weight = torch.randn(num_outputs, num_inputs)
        implementations = cpp_implementations()
        self._weight = PackedWeight.of(weight, implementations[-1]) if implementations else weight

    def multiply(self, rows: Tensor) -> None:
        if isinstance(self._weight, PackedWeight):
            linear(rows, self._weight)
        else:
            torch_linear(rows, self._weight)


def main() -> None:
    # The same settings as in the worker.
    prepare_memory()
    keep_freed_memory()
    given = job()
    model = MODELS[given["name"]]
    shapes = _shapes(Work.of_json(given["work"]))
    products = Products(model)
    # The first run creates the inputs of each shape.
    serve({name: lambda: _run(model, products, shapes) for name in ("warm", "run")})


def _shapes(work: Work) -> list[tuple[int, int]]:
    """Return the numbers of tokens and of sampled tokens of each of the runner's steps."""
    settings = WorkerSettings.load([])
    taken = batched_steps(
        work,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        block_size=settings.block_size,
        num_blocks=_MANY_BLOCKS,
    )
    return [
        (step.num_scheduled_tokens, len(step.sampling))
        for step in taken
        if step.num_scheduled_tokens
    ]


@torch.inference_mode()
def _run(model: BenchModel, products: Products, shapes: list[tuple[int, int]]) -> dict[str, object]:
    def steps() -> None:
        for shape in shapes:
            products.step(*shape)

    most_tokens = max(num_tokens for num_tokens, _ in shapes)
    return {
        "torch_flops_per_s": products.torch_rate(most_tokens),
        "flops_per_s": products.rate(most_tokens),
        "seconds": _timed_s(steps),
        "flops": sum(model.flops(*shape) for shape in shapes),
    }


def _timed_s(work: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
