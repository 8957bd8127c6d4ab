"""A device without data, torch's "meta", in place of a GPU: reading a number fails, and so does
mixing its tensors with a CPU's.

The host launches steps as on a GPU; only Triton's kernels do nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from host_device import HostStreams
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.dispatch import Implementation
from worker_svc.cache.kv_pool import KvPool
from worker_svc.gpu.graphs import Capturer
from worker_svc.gpu.pipelined_runner import PipelinedRunner
from worker_svc.loading.startup import start_pipelined
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.runner.multi_step import MultiStepRunner
from worker_svc.runner.runner import Runner
from worker_svc.runner.step_runner import LoadedRunner

_DEVICE = torch.device("meta")
# All that a step launches, by module; blocks are moved by torch here.
_KERNELS = {
    "attention": ("paged_attention_kernel", "merge_partitions_kernel"),
    "kv_write": ("_kv_write_kernel",),
    "logits": ("_bitmask_kernel", "_penalties_kernel"),
    "logprobs": ("_tiles_kernel", "_row_kernel"),
    "sampling": (
        "peaks_kernel",
        "argmax_kernel",
        "collect_kernel",
        "filter_kernel",
        "merge_splits_kernel",
    ),
    "typical_p": ("_typical_p_kernel",),
    "round_rows": ("_round_rows_kernel",),
    "tiled_linear": ("tiled_linear_kernel", "int8_linear_kernel", "add_splits_kernel"),
    "fused.activation": ("gated_activation_kernel",),
    "fused.norm": ("rms_norm_kernel",),
    "fused.rotation": ("qk_norm_rope_kernel", "rope_kernel"),
}
CHANGES = {*_KERNELS["logits"], *_KERNELS["typical_p"]}  # of logits
# Of quantised weights.
PRODUCTS = {*_KERNELS["round_rows"], *_KERNELS["tiled_linear"]}
FUSED = {name for module, names in _KERNELS.items() if "fused" in module for name in names}


class Crossings(TorchFunctionMode):
    """Records operations that bring a CPU's numbers to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or result.device != _DEVICE:
            return result
        made = function in (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
        # Lists are numbers where they are indices, and tensors where they are joined.
        is_index = function is Tensor.__getitem__ and isinstance(args[1], list)
        if made or is_index or any(map(_is_of_the_host, _leaves(args))):
            self.found.append(function.__name__)
        return result


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _leaves(value)
        else:
            yield value


def _is_of_the_host(value: object) -> bool:
    return isinstance(value, np.ndarray) or (isinstance(value, Tensor) and value.is_cpu)


class TorchLaunches(TorchDispatchMode):
    """Counts the operations of torch that launch a kernel: all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        given = {_memory(each) for each in _leaves(args) if isinstance(each, Tensor)}
        results = [each for each in _leaves([result]) if isinstance(each, Tensor)]
        is_new = any(each.device == _DEVICE and _memory(each) not in given for each in results)
        if function._schema.is_mutable or (is_new and "empty" not in name):
            self.names[name] += 1
        return result


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class IdleKernel:
    """Accepts any launch, counts it, and does nothing."""

    def __init__(self) -> None:
        self.num_launches = 0
        # What Triton compiles separately: the types of tensors, absent arguments, constants.
        self.variants: set[tuple[Any, ...]] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(isinstance(size, int) and size > 0 for size in grid)
        return self._launch

    def _launch(self, *args: object, **named: object) -> None:
        self.num_launches += 1
        kinds = [each.dtype if isinstance(each, Tensor) else each is None for each in args]
        self.variants.add((*kinds, *sorted((name, str(named[name])) for name in named)))
        tensors = [each for each in (*args, *named.values()) if isinstance(each, Tensor)]
        assert {tensor.device for tensor in tensors} == {_DEVICE}


def idle_kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, IdleKernel]:
    """Replace each kernel by an idle one."""
    kernels = {name: IdleKernel() for names in _KERNELS.values() for name in names}
    for module, names in _KERNELS.items():
        for name in names:
            monkeypatch.setattr(f"kernels.gpu.{module}.{name}", kernels[name])
    return kernels


def _moved(part: Any) -> Any:
    """What replaces a part of a model, with its tensors on the device. Modules move by
    themselves."""
    if isinstance(part, Tensor):
        return part.to(_DEVICE)
    if isinstance(part, (list, tuple)):
        return [_moved(each) for each in part]
    if not is_dataclass(part) or isinstance(part, type):
        return part
    return replace(part, **{each.name: _moved(getattr(part, each.name)) for each in fields(part)})


def dataless(loaded: LoadedRunner, capturer: Capturer | None = None) -> PipelinedRunner:
    """The model without its data, as a GPU serves it. Warmed up."""
    assert isinstance(loaded.runner, MultiStepRunner)
    runner = loaded.runner.runner
    assert isinstance(runner, Runner)
    network: Any = runner._model.network
    for module in network.modules():
        if is_dataclass(module.forward):
            module.forward = _moved(module.forward)
    model = replace(runner._model, network=network.to(_DEVICE), device=_DEVICE)
    pool = KvPool(model.layers, runner._pool.size, runner._pool.block_size, _DEVICE)
    attention = PagedAttention(pool.layers, Implementation.TRITON)
    model.set_attention(attention)
    return start_pipelined(
        model, pool, attention, runner._tables, Implementation.TRITON, HostStreams(), capturer
    )
