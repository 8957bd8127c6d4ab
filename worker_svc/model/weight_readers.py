"""Finds weights of linear layers that other code reads, past the layer's forward pass. They cannot
be replaced by packed ones."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class ProbedWeights:
    """What a pass of a few tokens shows of a model's weights."""

    # Linear layers whose weights other code reads.
    read_elsewhere: frozenset[nn.Module]
    # Whether the logits are finite numbers.
    is_finite: bool


@torch.inference_mode()
def probe_weights(network: Any) -> ProbedWeights:
    """Run a few tokens through an unmodified model.

    A pass may leave some experts out, so a weight that is read elsewhere stands for those of the
    same place in all layers and experts.
    """
    owners: dict[int, set[nn.Module]] = defaultdict(set)
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            owners[id(module.weight)].add(module)
    with _WeightReads(owners) as reads:
        is_finite = has_finite_logits(network)
    names = {module: name for name, module in network.named_modules()}
    places = {_place(names[module]) for module in reads.found if module in names}
    return ProbedWeights(
        frozenset(
            module
            for module, name in names.items()
            if type(module) is nn.Linear and _place(name) in places
        ),
        is_finite,
    )


@torch.inference_mode()
def has_finite_logits(network: Any) -> bool:
    """Whether a few tokens have logits that are finite numbers."""
    device = network.device
    tokens, positions = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 1, 2, 3]])
    output = network(
        input_ids=tokens.to(device),
        position_ids=positions.to(device),
        use_cache=False,
        logits_to_keep=torch.arange(tokens.shape[1], device=device),
    )
    return bool(output.logits.isfinite().all())


class _WeightReads(TorchFunctionMode):
    """Records the layers whose weights are arguments of an operation outside their forward pass.
    Reads of a weight's shape or dtype do not count."""

    def __init__(self, owners: Mapping[int, Iterable[nn.Module]]) -> None:
        super().__init__()
        self.found: set[nn.Module] = set()
        self._owners = owners
        # The layers whose forward pass is running, innermost last.
        self._running: list[nn.Module] = []
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> "_WeightReads":
        for layer in {layer for layers in self._owners.values() for layer in layers}:
            self._hooks += [
                layer.register_forward_pre_hook(self._begin),
                layer.register_forward_hook(self._end, always_call=True),
            ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def _begin(self, layer: nn.Module, args: object) -> None:
        self._running.append(layer)

    def _end(self, layer: nn.Module, args: object, output: object) -> None:
        self._running.remove(layer)

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            for argument in (*args, *(kwargs or {}).values()):
                owners = self._owners.get(id(argument), ())
                if not (self._running and self._running[-1] in owners):
                    self.found.update(owners)
        return result


def _place(name: str) -> str:
    """A module's name without the numbers of layers and experts."""
    return re.sub(r"\b\d+\b", "*", name)
