"""Makes a prepared stage continue the pass of the stage before it.

This is done last. Until then a stage is a model by itself, with stand-ins of an embedding and a
head, so that its parts are compared and replaced as in any other model.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Final

from torch import Tensor, nn

from worker_svc.model.checkpoint import ModelError
from worker_svc.model.fused_forward import FusedForward
from worker_svc.model.stages.stage import Stage
from worker_svc.model.weight_packing import set_forward

# Of the base models of transformers.
_LAYERS: Final = ("layers", "h")
_NORM: Final = ("norm", "ln_f")


@dataclass
class Inlet:
    """Where a stage gets its hidden states: they take the place of what its own embedding gives."""

    states: Tensor | None = field(default=None, init=False)  # [1, num_tokens, hidden_size]

    def __call__(self, ids: Tensor) -> Tensor:
        """The forward pass of an embedding."""
        assert self.states is not None
        return self.states

    def replace_input(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before a layer is called."""
        return (self.states, *args[1:])


def join_stage(network: Any, stage: Stage) -> Inlet:
    """Let a stage begin with the states of its inlet, unless it is the first, and end without a
    norm, unless it is the last. ModelError if the model has no such parts."""
    inlet, base = Inlet(), network.base_model
    if not stage.is_last:
        set_forward(_part(base, _NORM), lambda states: states)
    if isinstance(network.forward, FusedForward):
        fused = replace(network.forward, embedding_and_head=None)
        network.forward = fused if stage.is_first else replace(fused, embed=inlet)
    elif not stage.is_first:
        # Behind whatever a model does with its embeddings.
        _part(base, _LAYERS)[0].register_forward_pre_hook(inlet.replace_input)
    return inlet


def _part(base: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        if (part := getattr(base, name, None)) is not None:
            return part
    raise ModelError(f"{type(base).__name__} has no {' or '.join(names)}, so it has no stages")
