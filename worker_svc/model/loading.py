"""Loads models and checks that they can be served. `LoadedModel` runs the forward pass.

Any causal model of transformers can be served whose class supports the attention interface and
whose only state is keys and values.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from quire.service.model_files import WEIGHTS_FILES
from worker_svc.cache.kv_pool import AttentionSpecs, dtype_name
from worker_svc.errors import WrongSettingError
from worker_svc.model.attention import (
    LayerProbe,
    UnsupportedModelError,
    register_probe,
    set_attention,
)
from worker_svc.model.checkpoint import (
    ModelError,
    find_model,
    model_fingerprint,
    rounding_name,
    weights_files,
)
from worker_svc.model.fused_forward import FusedForward
from worker_svc.model.load_progress import LoadProgress
from worker_svc.model.longrope import choose_longrope_factors, longrope_default
from worker_svc.model.quantized.checkpoint_tensors import CheckpointTensors
from worker_svc.model.quantized.formats import GGUF, open_checkpoint, quantization_of
from worker_svc.model.quantized.network import load_complete, load_network, move_stand_ins
from worker_svc.model.quantized.sources import RoundedInputs, WeightSources
from worker_svc.model.served_model import AttentionFunction, FinalStates
from worker_svc.model.shards.shard import Shard
from worker_svc.model.shards.shard_loading import layers_of, load_shard
from worker_svc.model.split_forward import split_forward
from worker_svc.sizes import size_text

log = structlog.get_logger()

_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory and its properties."""

    network: Any  # the transformers model
    layers: AttentionSpecs  # of attention, in the order of calls
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    vocab_size: int  # of the whole model, also where this is a shard
    fingerprint: bytes
    weights: tuple[Path, ...]  # safetensors files, or one of GGUF
    num_earlier_layers: int = 0  # of attention, in other stages
    num_later_layers: int = 0
    # The layers whose weights are quantised in the checkpoint. Their own are NaN. Empty once they
    # are packed, so that no file stays mapped.
    quantized: WeightSources = field(default_factory=dict)

    def set_attention(self, function: AttentionFunction) -> None:
        """Replace the attention function of every layer."""
        set_attention(self.network, function)

    def logits(
        self,
        input_ids: Tensor,
        positions: Tensor,
        logits_indices: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Float32 `[len(logits_indices), vocab_size]` of a flat batch; in `out` if given."""
        logits = self.own_logits(input_ids, positions, logits_indices, out)
        if out is None:
            return logits.float()
        return out if logits is out else out.copy_(logits)

    def final_states(self, input_ids: Tensor, positions: Tensor) -> FinalStates:
        """As `logits`, with the head still to be run."""
        return split_forward(self.network, input_ids, positions)

    def own_logits(
        self,
        input_ids: Tensor,
        positions: Tensor,
        logits_indices: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """`logits` in the type that the model gives; in `out` only if the model can do that."""
        forward = self.network.forward
        if isinstance(forward, FusedForward):
            # For a single call the overhead of calling a module is significant.
            logits = forward.in_one_call(input_ids, positions, logits_indices, out)
            if logits is not None:
                return logits
        output = self.network(
            input_ids=input_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=logits_indices,
        )
        flat: Tensor = output.logits[0]
        return flat


def load_model(
    model: str,
    revision: str | None,
    dtype: str,
    device: torch.device,
    max_model_len: int | None,
    progress: LoadProgress | None = None,
    quantization: str | None = None,
    int8_activations: bool = False,
    shard: Shard | None = None,
) -> LoadedModel:
    """Load a folder or, if there is none of that name, a model of the hub. The weights are those of
    the checkpoint; `quantization` only checks that they can be rounded, and is a part of the
    fingerprint. `int8_activations` allows products of the checkpoint's quantised weights to round
    their inputs. With a `shard` only that is loaded; the fingerprint is that of the whole model.

    ModelError: not found, no safetensors, or a class that cannot be served. WrongSettingError:
    `max_model_len` is larger than the model's own, a quantisation that is not possible, or
    `int8_activations` without quantised weights.
    """
    progress = progress or LoadProgress()
    folder = find_model(model, revision, list(WEIGHTS_FILES), progress)
    weights = weights_files(folder)
    config = _read_config(folder)
    network_class = _network_class(config)
    stored = quantization_of(config, weights)
    _check_quantization(quantization, stored)
    if int8_activations and quantization is None and stored is None:
        raise WrongSettingError("--int8-activations: the checkpoint has no quantised weights")
    length = _max_model_len(config.get_text_config(), max_model_len)
    num_bytes = sum(path.stat().st_size for path in weights)
    progress.begin(f"reading {size_text(num_bytes)} of weights")
    choose_longrope_factors(config.get_text_config(), length)
    probe = LayerProbe(length)
    probe_name = register_probe(probe)
    options = {"dtype": dtype, "attn_implementation": probe_name}
    loaded = _load(network_class, config, folder, weights, stored, shard, options)
    network, sources = loaded.network, loaded.quantized
    if int8_activations:
        sources = {layer: RoundedInputs(source) for layer, source in sources.items()}
    move_stand_ins(sources, device)
    network.to(device).eval()
    layers = _probe_layers(network, probe, device)
    rounding = rounding_name(quantization, int8_activations)
    log.info("model loaded", model=model, type=network_class.__name__, device=str(device))
    return LoadedModel(
        network=network,
        layers=layers,
        dtype=network.dtype,
        device=device,
        max_model_len=length,
        vocab_size=config.get_text_config().vocab_size,
        fingerprint=model_fingerprint(folder, dtype_name(network.dtype), weights, rounding),
        weights=weights,
        num_earlier_layers=loaded.num_earlier_layers,
        num_later_layers=loaded.num_later_layers,
        quantized=sources,
    )


def _check_quantization(quantization: str | None, stored: Mapping[str, Any] | None) -> None:
    """Refuse to round weights that are quantised already."""
    if quantization is not None and stored is not None:
        raise WrongSettingError(
            f"--quantization: {quantization}, but the checkpoint is quantised by "
            f"{stored['quant_method']} already; leave it out"
        )


@dataclass(frozen=True)
class _Loaded:
    """A network, or this process's part of it."""

    network: Any
    quantized: WeightSources
    num_earlier_layers: int = 0
    num_later_layers: int = 0


def _load(
    network_class: Any,
    config: Any,
    folder: Path,
    weights: tuple[Path, ...],
    quantization: Mapping[str, Any] | None,
    shard: Shard | None,
    options: Mapping[str, Any],
) -> _Loaded:
    """`quantization` is that of the checkpoint."""
    if quantization is None and shard is None:
        dtype = options["dtype"]
        own = {**options, "dtype": dtype if dtype == "auto" else getattr(torch, dtype)}
        CheckpointTensors(weights)  # Names the file if one is damaged.
        network = load_complete(network_class, folder, config=config, use_safetensors=True, **own)
        return _Loaded(network, {})
    stored = open_checkpoint(quantization, network_class, config, weights)
    is_gguf = quantization is not None and quantization["quant_method"] == GGUF
    if is_gguf and options["dtype"] == "auto":
        # Norms are in float32 whatever the model's type.
        options = {**options, "dtype": dtype_name(config.dtype or torch.bfloat16)}
    if shard is None:
        plain = {name: tensor[...] for name, tensor in stored.plain.items()}
        return _Loaded(*load_network(network_class, config, plain, stored.quantized, **options))
    layers = None if shard.stage is None else layers_of(config, stored, shard.stage)
    loaded = load_shard(network_class, config, stored, shard, layers, **options)
    if layers is None:
        return _Loaded(*loaded)
    return _Loaded(*loaded, layers.start, config.num_hidden_layers - layers.stop)


def _read_config(folder: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # Of any kind: each family's config has code of its own.
        raise ModelError(f"{folder}: unreadable config.json: {error}") from error
    text = config.get_text_config()
    if getattr(text, "use_bidirectional_attention", None) == "vision":
        # Of Gemma 4. Only tokens of images attend to later ones, and there are none.
        text.use_bidirectional_attention = None
    return config


def _network_class(config: Any) -> Any:
    """The model's class. ModelError, which names it, if it cannot be served."""
    network_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if network_class is None:
        raise ModelError(f"{type(config).__name__} is not the config of a causal language model")
    name = network_class.__name__
    if not network_class.is_backend_compatible():
        raise ModelError(f"{name} does not support transformers' attention interface")
    if getattr(network_class, "_is_stateful", False):
        raise ModelError(f"{name} has state other than keys and values")
    text = config.get_text_config()
    layer_types = set(getattr(text, "layer_types", None) or ())
    if not layer_types <= _LAYER_TYPES:
        raise ModelError(f"{name} has layers of type {sorted(layer_types - _LAYER_TYPES)}")
    if getattr(text, "attn_temperature_tuning", False) and not all(text.no_rope_layers):
        # Llama 4 takes the places for positions, which a line of several sequences has not.
        raise ModelError(
            f"{name} scales queries by their places in a batch (attn_temperature_tuning)"
        )
    if getattr(text, "recurrent_kv_cache_mode", None) == "last_loop":
        # Of Dory. A pass without transformers' cache has keys of every loop.
        raise ModelError(
            f"{name} reads in each loop what its last loop cached (recurrent_kv_cache_mode)"
        )
    return network_class


def _max_model_len(config: Any, wanted: int | None) -> int:
    limit: int | None = getattr(config, "max_position_embeddings", None)
    length = longrope_default(config, limit) if wanted is None else wanted
    if length is None:
        raise WrongSettingError("--max-model-len: the model has no limit of its own, so set one")
    if limit is not None and limit < 1:
        raise ModelError(f"the model's config has max_position_embeddings {limit}; correct it")
    if limit is not None and length > limit:
        raise WrongSettingError(f"--max-model-len: {length} is more than the model's {limit}")
    return length


@torch.inference_mode()
def _probe_layers(network: Any, probe: LayerProbe, device: torch.device) -> AttentionSpecs:
    """Run two tokens through the model to record the heads and dimensions of every layer."""
    tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
    positions = torch.arange(2, device=device).unsqueeze(0)
    try:
        network(input_ids=tokens, position_ids=positions, use_cache=False)
        probe.check_cache(network.config)
    except UnsupportedModelError as error:
        raise ModelError(f"{type(network).__name__}: {error}") from error
    except Exception as error:  # Of any kind: the code is the model's own.
        raise ModelError(f"{type(network).__name__} does not run here: {error!r}") from error
    if not probe.layers:
        raise ModelError(f"{type(network).__name__} has no attention layer")
    return tuple(probe.layers)
