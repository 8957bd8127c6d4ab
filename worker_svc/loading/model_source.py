"""Gets a model from the cache of packed weights or from its checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch

from kernels.dispatch import HAS_TRITON, Implementation
from kernels.flash import FlashAttention
from worker_svc.model.load_progress import LoadProgress
from worker_svc.model.served_model import ServedModel
from worker_svc.packed.model_cache import ModelCache
from worker_svc.ranks.group import RankGroup
from worker_svc.service.process import block_import
from worker_svc.settings import WorkerSettings


@dataclass(frozen=True)
class ModelSource:
    """A model in memory, and how it is run."""

    model: ServedModel
    implementation: Implementation
    flash: FlashAttention | None
    # To be called once when it can serve.
    is_ready: Callable[[], object]


def load_source(
    settings: WorkerSettings,
    device: torch.device,
    progress: LoadProgress,
    ranks: RankGroup | None = None,
) -> ModelSource:
    """The model from the cache of packed weights, else from its checkpoint. A shard, which is not
    one call, is never in the cache. ModelError and WrongSettingError as in `load_model`."""
    cache = ModelCache.of(settings, device, progress) if ranks is None else None
    if cache is not None and (packed := cache.load(progress)) is not None:
        reading = cache.read_ahead()

        def is_ready() -> None:
            reading.join()
            cache.begin_to_serve()

        return ModelSource(packed, packed.implementation, None, is_ready)
    if not HAS_TRITON:
        # By way of torch's compiler, transformers would import it.
        block_import("triton")
    # transformers takes seconds to import.
    preparation = import_module("worker_svc.loading.model_preparation")
    prepared = preparation.prepare_model(settings, device, progress, ranks)

    def store() -> None:
        if cache is not None and prepared.packed is not None:
            cache.store(prepared.packed)

    return ModelSource(prepared.model, prepared.implementation, prepared.flash, store)
