"""A forward pass in two parts: the final hidden states of all tokens, and the head, which gives the
logits of any of them. So logits of many tokens are computed in slices."""

from typing import Any

from torch import Tensor

from worker_svc.model.elementwise_fusion import replaced_forward
from worker_svc.model.fused_forward import FusedForward
from worker_svc.model.served_model import FinalStates


def split_forward(network: Any, input_ids: Tensor, positions: Tensor) -> FinalStates:
    """Run a transformers model up to its head over a flat batch."""
    forward = network.forward
    if isinstance(forward, FusedForward):
        states = forward.states(input_ids.unsqueeze(0), positions.unsqueeze(0))
        return FinalStates(states[0], forward.head)
    base = _body(network)
    outputs: list[Any] = []
    base_forward = base.forward

    def record(*args: Any, **named: Any) -> Any:
        outputs.append(base_forward(*args, **named))
        return outputs[0]

    arguments = {"use_cache": False, "logits_to_keep": input_ids.new_zeros(0)}
    with replaced_forward(base, record):
        network(input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), **arguments)
    output = outputs[0]

    def head(states: Tensor) -> Tensor:
        """What follows that module in the network's own code: the head, and caps or scales."""
        num_tokens = states.shape[1]
        given = type(output)(last_hidden_state=states)
        with replaced_forward(base, lambda *args, **named: given):
            logits: Tensor = network(
                input_ids=input_ids[:num_tokens].unsqueeze(0),
                position_ids=positions[:num_tokens].unsqueeze(0),
                use_cache=False,
            ).logits
        return logits

    return FinalStates(output.last_hidden_state[0], head)


def _body(network: Any) -> Any:
    """The module whose hidden states the head reads: of OPT a part of the base model. Llama 4 has
    none of the name that transformers takes for the base model."""
    decoder = network.get_decoder()
    return network.model if decoder is network else decoder
