"""GGUF files on several ranks: shards and stages give what one rank gives, each with its part."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runners import decoded, runner_of, staged
from rank_threads import rank_threads
from shard_models import logits_of, prepared

from worker_svc.errors import WrongSettingError
from worker_svc.model.loading import load_model
from worker_svc.model.quantized.gguf_folder import make_folder
from worker_svc.model.shards.shard import Shard
from worker_svc.model.stages.stage import Stage

models = pytest.importorskip("gguf_models")

# Sums in another order.
_TOLERANCE = 1e-3


def q4_k_m(name: str) -> str:
    """The mixture of llama.cpp's Q4_K_M."""
    return "Q6_K" if name == "output.weight" or "attn_v" in name else "Q4_K"


def q8_0(name: str) -> str:
    return "Q8_0"


def f16(name: str) -> str:
    return "F16"


def served(config: Any, folder: Path, kind_of: Callable[[str], str] = q4_k_m) -> Path:
    make_folder(models.write_gguf(config, folder, kind_of), folder / "served")
    return folder / "served"


@pytest.mark.parametrize(
    ("family", "tied", "kind_of", "num_ranks", "num_stages"),
    [
        ("llama", True, q4_k_m, 4, 2),
        *(
            pytest.param(family, tied, kind_of, *ranks, marks=pytest.mark.slow)
            for family, tied, kind_of in (("llama", True, q8_0), ("qwen3", False, f16))
            for ranks in ((2, 2), (4, 2), (2, 1))
        ),
    ],
)
def test_ranks_give_what_one_rank_gives(
    family: str,
    tied: bool,
    kind_of: Callable[[str], str],
    num_ranks: int,
    num_stages: int,
    tmp_path: Path,
) -> None:
    model = served(getattr(models, family)(tied), tmp_path, kind_of)
    expected = logits_of(prepared(model))
    with rank_threads(num_ranks, num_stages) as ranks:
        # transformers loads one model at a time.
        parts = [prepared(model, group) for group in ranks.groups]
        found = ranks.run(lambda rank: logits_of(parts[rank]))[0]
    assert (found - expected).abs().max() < _TOLERANCE * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_stages_give_the_tokens_of_one_rank(num_ranks: int, tmp_path: Path) -> None:
    model = served(models.llama(), tmp_path)
    expected = decoded(runner_of(prepared(model), None), 24)
    assert len(set(expected)) >= 6
    with staged(model, num_ranks) as runner:
        assert decoded(runner, 24) == expected


@pytest.mark.parametrize(
    ("kind_of", "num_shards", "num_stages"),
    [
        (q4_k_m, 2, 2),
        *(
            pytest.param(kind_of, *ranks, marks=pytest.mark.slow)
            for kind_of in (q4_k_m, f16)
            for ranks in ((2, 1), (1, 2))
        ),
    ],
)
def test_each_rank_keeps_its_part(
    kind_of: Callable[[str], str], num_shards: int, num_stages: int, tmp_path: Path
) -> None:
    model = str(served(models.llama(), tmp_path, kind_of))

    def kept(shard: Shard | None) -> int:
        """Numbers of quantised and plain weights, without those of the vocabulary."""
        loaded = load_model(model, None, "auto", torch.device("cpu"), 8, shard=shard)
        network = loaded.network
        outer = {network.get_input_embeddings(), network.get_output_embeddings()}
        weights = [read() for layer, read in loaded.quantized.items() if layer not in outer]
        plain = sum(
            one.numel()
            for layer in network.model.layers
            for one in layer.parameters()
            if not one.isnan().any()
        )
        return sum(weight.values.numel() for weight in weights) + plain

    whole = kept(None)
    for stage in range(num_stages):
        for index in range(num_shards):
            place = Stage(stage, num_stages) if num_stages > 1 else None
            part = kept(Shard(index, num_shards, place))
            assert part <= 1.1 * whole / (num_shards * num_stages)


def test_refuses_parts_of_blocks(tmp_path: Path) -> None:
    config = models.llama()
    config.intermediate_size = 288
    model = served(config, tmp_path, q8_0)
    words = r"144 inputs of .*\.down_proj are not whole groups of 32; use another number of ranks"
    with rank_threads(2) as ranks, pytest.raises(WrongSettingError, match=words):
        prepared(model, ranks.groups[1])
