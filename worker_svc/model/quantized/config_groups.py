"""The `config_groups` of compressed-tensors: which layers have which scheme."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, get_args

from kernels.quantized import Bits
from worker_svc.model.checkpoint import ModelError
from worker_svc.model.quantized.config_fields import integer_of, object_of, text_of, texts_of

Strategy = Literal["tensor", "channel", "group"]

_STRATEGIES: Final[tuple[Strategy, ...]] = get_args(Strategy)
_FORMATS: Final = ("pack-quantized", "int-quantized", "naive-quantized")


@dataclass(frozen=True)
class ConfigGroup:
    """The scheme of some layers."""

    bits: Bits
    int8_activations: bool
    strategy: Strategy  # what has one scale
    group_size: int  # in inputs; -1 without groups
    is_symmetric: bool  # otherwise weights have zero points


@dataclass(frozen=True)
class ConfigGroups:
    """The groups by their targets. A target is the name of a layer, `re:` and a pattern of names,
    or a class."""

    by_target: Mapping[str, ConfigGroup]
    ignore: tuple[str, ...]  # targets of layers that are not quantised

    def group_of(self, layer: str, classes: Iterable[str]) -> ConfigGroup | None:
        """The group of a layer of these classes; None if it is not quantised.

        The order is that of compressed-tensors (`match_targets`): names, patterns, classes, and
        alphabetical among these. That of the groups does not matter.
        """
        classes = frozenset(classes)
        if any(_names(target, layer) or target in classes for target in self.ignore):
            return None
        named = [target for target in self._sorted if _names(target, layer)]
        matched = named or [target for target in self._sorted if target in classes]
        return self.by_target[matched[0]] if matched else None

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted(self.by_target, key=lambda target: ("re:" in target, target))


def read_config_groups(config: Mapping[str, Any]) -> ConfigGroups:
    """ModelError if there are none, or for schemes that are not served."""
    # As in the library, the last of several groups with the same target has it.
    by_target = {
        str(target): _config_group(group, str(config.get("format", "")))
        for name, group in object_of(config, "config_groups").items()
        for target in _targets(name, group)
    }
    if not by_target:
        raise ModelError("compressed-tensors without config_groups, or without targets in them")
    ignore = texts_of(config, "ignore")
    for target in (*by_target, *ignore):
        _check_pattern(target)
    return ConfigGroups(by_target, ignore)


def _targets(name: str, group: object) -> Sequence[str]:
    if not isinstance(group, Mapping):
        raise ModelError(
            f"compressed-tensors: the group {name} is no object; write the scheme of a preset out, "
            "as in checkpoints that the library saves"
        )
    return texts_of(group, "targets")


def _names(target: str, layer: str) -> bool:
    """Whether a target is this layer, other than by its class."""
    if target.startswith("re:"):
        return re.match(target[3:], layer) is not None
    return target == layer


def _check_pattern(target: str) -> None:
    if not target.startswith("re:"):
        return
    try:
        re.compile(target[3:])
    except re.error as error:
        raise ModelError(f"compressed-tensors: the target {target}: {error}") from error


def _config_group(group: Mapping[str, Any], format_name: str) -> ConfigGroup:
    weights = object_of(group, "weights")
    format_name = group.get("format") or format_name
    if format_name not in _FORMATS:
        raise ModelError(
            f"compressed-tensors in the format {format_name}; served are {', '.join(_FORMATS)}"
        )
    kind, bits = weights.get("type", "int"), weights.get("num_bits")
    if kind != "int" or bits not in (4, 8):
        raise ModelError(f"compressed-tensors: {kind} weights of {bits} bits; served are int 4, 8")
    has_activations = group.get("input_activations") is not None
    if has_activations:
        activations = object_of(group, "input_activations")
        kind, num_bits = activations.get("type", "int"), activations.get("num_bits")
        if (kind, num_bits) != ("int", 8):
            raise ModelError(f"compressed-tensors: {kind} activations of {num_bits} bits")
    strategy, group_size = _strategy(
        text_of(weights, "strategy"), integer_of(weights, "group_size")
    )
    is_symmetric = weights.get("symmetric", True) is not False
    return ConfigGroup(bits, has_activations, strategy, group_size, is_symmetric)


def _strategy(name: str | None, group_size: int | None) -> tuple[Strategy, int]:
    """The strategy and its group size. Without a name it follows from the size, as in the
    library."""
    size = -1 if group_size is None else group_size
    if name is None:
        name = "tensor" if group_size is None else "channel" if size == -1 else "group"
    strategy = next((known for known in _STRATEGIES if known == name.lower()), None)
    if strategy is None:
        raise ModelError(
            f"compressed-tensors: weights with the strategy {name}; "
            f"served are {', '.join(_STRATEGIES)}"
        )
    if (size > 0) != (strategy == "group") or size < -1:
        raise ModelError(
            f"compressed-tensors: weights with the strategy {strategy} and group_size {group_size};"
            " correct the config: a positive size belongs to the strategy group"
        )
    return strategy, size if strategy == "group" else -1
