"""Loads what proposes draft tokens: nothing, prompt lookup, or a draft model.

Heads on the target's hidden states (EAGLE) would be a third kind: loaded as a draft model is, with
layers of their own in the pool, and a `Drafter` that gets the final states of each pass.
"""

from dataclasses import dataclass

import torch

from kernels.dispatch import Implementation
from worker_svc.cache.cache_setup import CachedLayers, cached_layers
from worker_svc.cache.kv_pool import KvPool
from worker_svc.errors import WrongSettingError
from worker_svc.loading.model_source import ModelSource, load_source
from worker_svc.model.checkpoint import ModelError
from worker_svc.model.load_progress import LoadProgress
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.model.served_model import ServedModel
from worker_svc.plan.tables import RowTables
from worker_svc.runner.sampling_params import SamplingParams
from worker_svc.settings import WorkerSettings
from worker_svc.speculation.draft_model import DraftModel
from worker_svc.speculation.draft_passes import DraftPasses
from worker_svc.speculation.drafter import Drafter
from worker_svc.speculation.priced_lengths import DraftPrice
from worker_svc.speculation.prompt_lookup import PromptLookup
from worker_svc.speculation.vocabularies import vocabulary_difference

_SETTING = "--speculative-model / QUIRE_WORKER_SPECULATIVE_MODEL"


@dataclass(frozen=True)
class LoadedDraftModel:
    """A draft model in memory."""

    source: ModelSource
    cached: CachedLayers
    price: DraftPrice


def require_speculation(settings: WorkerSettings, device: torch.device) -> None:
    """WrongSettingError if the device cannot speculate as the settings say."""
    if settings.num_speculative_tokens and device.type == "cuda":
        raise WrongSettingError(
            "--num-speculative-tokens / QUIRE_WORKER_NUM_SPECULATIVE_TOKENS: not on a GPU, whose "
            "steps are launched before the tokens of earlier ones are known; leave it at 0"
        )
    if settings.speculative_model is not None and not settings.num_speculative_tokens:
        raise WrongSettingError(
            f"{_SETTING}: {settings.speculative_model}, but --num-speculative-tokens is 0; set it "
            "to 1 or more"
        )


def load_draft_model(
    settings: WorkerSettings, target: ServedModel, device: torch.device, progress: LoadProgress
) -> LoadedDraftModel | None:
    """None if there is to be none. It is whole, also where the target has several ranks.
    WrongSettingError if it cannot propose tokens of the target."""
    if settings.speculative_model is None:
        return None
    of_draft = _settings_of_draft(settings, settings.speculative_model, target)
    try:
        source = load_source(of_draft, device, progress)
    except (ModelError, WrongSettingError, OSError, RuntimeError, ValueError) as error:
        raise WrongSettingError(
            f"{_SETTING}: cannot be loaded for {target.max_model_len} positions, with --dtype, "
            f"--quantization and --kernels of the model: {error}"
        ) from error
    _require_same_vocabulary(source.model, target)
    cached = cached_layers(source.model, of_draft, source.implementation)
    # Ranks of a stage read the target's weights at the same time, and stages one after another.
    target_bytes = _num_bytes(target) / settings.tensor_parallel_size
    price = DraftPrice.of(_num_bytes(source.model), target_bytes)
    return LoadedDraftModel(source, cached, price)


def _settings_of_draft(settings: WorkerSettings, model: str, target: ServedModel) -> WorkerSettings:
    """Those under which the draft model is loaded."""
    return settings.model_copy(
        update={
            "model": model,
            "revision": None,
            "max_model_len": target.max_model_len,
            # Its own checkpoint need not be quantised where that of the target is.
            "int8_activations": settings.int8_activations and settings.quantization is not None,
            "enable_torch_compile": False,
        }
    )


def _require_same_vocabulary(draft: ServedModel, target: ServedModel) -> None:
    if draft.vocab_size != target.vocab_size:
        raise WrongSettingError(
            f"{_SETTING}: has a vocabulary of {draft.vocab_size} tokens, and the model one of "
            f"{target.vocab_size}; it has to be the same"
        )
    files = (model.weights[0].parent / "tokenizer.json" for model in (target, draft))
    if (difference := vocabulary_difference(*files)) is not None:
        raise WrongSettingError(f"{_SETTING}: has another vocabulary: {difference}")


def _num_bytes(model: ServedModel) -> int:
    """Of the weights: most of a small step's time is reading them."""
    return sum(path.stat().st_size for path in model.weights)


def make_drafter(
    settings: WorkerSettings,
    draft: LoadedDraftModel | None,
    pool: KvPool,
    tables: RowTables,
    implementation: Implementation,
) -> Drafter | None:
    """`pool` has the layers of a draft model last; `implementation` is that of the sampler."""
    most = settings.num_speculative_tokens
    if not most:
        return None
    if draft is None:
        return PromptLookup(most, tables, implementation)
    model, cached = draft.source.model, draft.cached
    layers = pool.layers[-len(cached.layers) :]
    attention = PagedAttention(layers, draft.source.implementation, cached.scales)
    model.set_attention(attention)
    passes = DraftPasses(model, attention, pool, tables)
    params = SamplingParams(tables, model.device)
    return DraftModel(most, draft.price, passes, tables, params, implementation)
