"""Loads packed models from the cache, and stores them."""

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog
import torch

from kernels.dispatch import NoSuchKernel, choose
from quire.service.model_files import WEIGHTS_FILES
from worker_svc.cache.kv_pool import dtype_name
from worker_svc.model.checkpoint import find_model, model_fingerprint, rounding_name, weights_files
from worker_svc.model.kernel_build import announce_compilation
from worker_svc.model.load_progress import LoadProgress
from worker_svc.packed.cache_folder import CacheFolder
from worker_svc.packed.codec import decode, encode
from worker_svc.packed.key import packed_model_key
from worker_svc.packed.mapping import Mapping
from worker_svc.packed.packed_model import PackedModel, PackedNetwork
from worker_svc.packed.tensor_file import DamagedFileError, TensorFile, TensorFileWriter
from worker_svc.settings import WorkerSettings
from worker_svc.sizes import size_text

log = structlog.get_logger()

# Below the threads of the forward pass.
_NICENESS: Final = 10


class ModelCache:
    """The cache's entry for the model and the settings of one worker."""

    def __init__(
        self, folder: CacheFolder, key: str, settings: WorkerSettings, weights: tuple[Path, ...]
    ) -> None:
        self._folder = folder
        self._key = key
        self._settings = settings
        self._weights = weights
        self._mapping: Mapping | None = None

    @classmethod
    def of(
        cls, settings: WorkerSettings, device: torch.device, progress: LoadProgress
    ) -> "ModelCache | None":
        """None if the worker does not use the cache: it is off, or no C++ kernels run the model,
        or scales of an 8-bit key-value cache have to be measured. ModelError if there is no such
        model."""
        assert settings.model is not None
        if not settings.weight_cache_size or device.type != "cpu":
            return None
        if settings.kv_cache_dtype != "auto" or sys.platform != "linux":
            return None
        if settings.enable_torch_compile or settings.attention not in ("auto", "paged"):
            return None  # Refused, with the reason, when the model is loaded.
        announce_compilation(settings.kernels, device, progress)
        try:
            implementation = choose("cpu", (), settings.kernels)
        except NoSuchKernel:
            return None  # Reported when the model's types are known.
        if not implementation.is_cpp:
            return None
        model = find_model(settings.model, settings.revision, list(WEIGHTS_FILES), progress)
        weights = weights_files(model)
        try:
            key = packed_model_key(model, weights, settings, implementation)
        except OSError:
            return None  # Reported when the model is loaded.
        folder = CacheFolder(settings.weight_cache or default_folder(), settings.weight_cache_size)
        return cls(folder, key, settings, weights)

    def load(self, progress: LoadProgress) -> PackedModel | None:
        """The model, mapped. None, with a line in the log unless there is no file, if it has to be
        loaded from the checkpoint. A file that cannot be used is removed."""
        file = self._folder.path(self._key)
        if not file.exists():
            return None
        progress.begin("mapping packed weights")
        try:
            stored = TensorFile.open(file)
            network = decode(stored.description, stored.tensors)
            self._check(network)
        except (OSError, DamagedFileError, LookupError, TypeError, ValueError) as error:
            log.warning("packed weights are made again", file=str(file), reason=str(error))
            self._folder.remove(self._key)
            return None
        self._folder.touch(self._key)
        self._mapping = stored.mapping
        log.info("packed weights", file=str(file), bytes=size_text(stored.mapping.num_bytes))
        return PackedModel(network, self._weights)

    def _check(self, network: PackedNetwork) -> None:
        """DamagedFileError unless it is that of the checkpoint's content."""
        settings = self._settings
        folder = self._weights[0].parent
        rounding = rounding_name(settings.quantization, settings.int8_activations)
        found = model_fingerprint(folder, dtype_name(network.dtype), self._weights, rounding)
        if found.hex() != network.fingerprint:
            raise DamagedFileError("it is that of another checkpoint")

    def store(self, network: PackedNetwork) -> None:
        """Write the model to the cache, in another thread."""
        tensors: dict[str, torch.Tensor] = {}
        content = TensorFileWriter(encode(network, tensors), tensors)

        def write() -> None:
            began_s = time.monotonic()
            if self._folder.write(self._key, content):
                log.info(
                    "packed weights cached",
                    file=str(self._folder.path(self._key)),
                    bytes=size_text(content.num_bytes),
                    seconds=round(time.monotonic() - began_s, 1),
                )

        _in_background(write, "weight-cache")

    def begin_to_serve(self) -> None:
        """To be called when a mapped model is ready: reads become faster in the background, unless
        its memory is to be shared."""
        if self._mapping is not None and not self._settings.weight_cache_shared:
            _in_background(self._mapping.copy_to_huge_pages, "huge-pages")

    def read_ahead(self) -> threading.Thread:
        """Read the pages of a mapped model, in another thread."""
        mapping = self._mapping
        assert mapping is not None
        return _in_background(mapping.read_ahead, "read-ahead")


def default_folder() -> Path:
    """The user's cache."""
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "quire" / "weights"


def _in_background(work: Callable[[], object], name: str) -> threading.Thread:
    def run() -> None:
        if sys.platform == "linux":
            # Of this thread alone.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
