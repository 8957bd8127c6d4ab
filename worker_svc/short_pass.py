"""The forward pass of a model whose layers run in one call, without what transformers does around
them in every step: masks and caches, which nobody looks at, and the last norm of tokens whose
logits nobody asked for."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import structlog
import torch
from torch import Tensor

from worker_svc.decoder_layers import LayerStack

log = structlog.get_logger()

_NETWORK_PARTS: Final = {"model", "lm_head"}
_MODEL_PARTS: Final = {"embed_tokens", "layers", "norm", "rotary_emb"}


@dataclass(frozen=True)
class Output:
    """As much of transformers' output as is needed."""

    logits: Tensor


@dataclass(frozen=True)
class ShortPass:
    """The parts of such a model, one after the other."""

    embed: Callable[[Tensor], Tensor]
    turn: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    layers: LayerStack
    norm: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]

    def __call__(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_to_keep: Tensor,
        use_cache: Literal[False],
    ) -> Output:
        """As the model is called here, and by nobody else: without a cache of transformers' own."""
        states = self.embed(input_ids)
        states = self.layers(states, position_embeddings=self.turn(states, position_ids))
        return Output(self.head(self.norm(states[:, logits_to_keep])))


@torch.inference_mode()
def shorten(network: Any) -> Counter[str]:
    """Exchanges the model's forward pass if all its layers are one call and it has no other parts
    than those; and if both give the same bits, which anything that happens between the parts would
    change."""
    count = Counter({"short passes": 0})
    if _parts(network) != _NETWORK_PARTS or _parts(network.model) != _MODEL_PARTS:
        return count
    model = network.model
    stack = model.layers[0].forward
    if not isinstance(stack, LayerStack):
        return count
    short = ShortPass(
        model.embed_tokens.forward, model.rotary_emb, stack, model.norm.forward, network.lm_head
    )
    if _gives_the_same(short, network):
        network.forward = short
        count["short passes"] = 1
    return count


def _gives_the_same(short: ShortPass, network: Any) -> bool:
    call: dict[str, Any] = {
        "input_ids": torch.tensor([[0, 1, 2, 3]]),
        "position_ids": torch.tensor([[1, 3, 6, 7]]),
        "logits_to_keep": torch.tensor([0, 3]),
        "use_cache": False,
    }
    expected = network(**call).logits
    try:
        return torch.equal(short(**call).logits, expected)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        log.warning("the model keeps its own forward pass", error=str(error))
        return False


def _parts(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()}
