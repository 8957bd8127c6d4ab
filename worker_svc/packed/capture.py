"""Takes the packed weights out of a loaded model."""

from worker_svc.model.fused_forward import FusedForward
from worker_svc.model.loading import LoadedModel
from worker_svc.packed.packed_model import PackedNetwork


def packed_network(model: LoadedModel) -> PackedNetwork | None:
    """The weights of a model whose forward pass is one call; None for any other."""
    forward = model.network.forward
    if not isinstance(forward, FusedForward) or forward.embedding_and_head is None:
        return None
    first, *_ = forward.layers.layers
    return PackedNetwork(
        layers=tuple(layer.weights for layer in forward.layers.layers),
        num_heads=first.num_heads,
        activation=first.activation,
        embedding_and_head=forward.embedding_and_head,
        attention=model.layers,
        vocab_size=model.vocab_size,
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        fingerprint=model.fingerprint.hex(),
    )
