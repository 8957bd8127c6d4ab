"""Models whose parts are prepared as on a rank, and their logits."""

from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE, random_network
from torch import Tensor
from transformers import PretrainedConfig
from worker_driver import BLOCK_SIZE, worker_settings

from kernels.attention import PagedBatch
from worker_svc.cache.kv_pool import KvPool
from worker_svc.cache.pool_size import PoolSize
from worker_svc.loading.model_preparation import PreparedModel, prepare_model
from worker_svc.model.load_progress import LoadProgress
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.model.served_model import ServedModel
from worker_svc.ranks.group import RankGroup

NUM_TOKENS: Final = 11
_CPU: Final = torch.device("cpu")


def saved(config: PretrainedConfig, folder: Path) -> Path:
    """With random biases and norms."""
    random_network(config).save_pretrained(folder)
    return folder


def with_computed(model: Path) -> Path:
    """Add the constants that older checkpoints of Llama and GPT-2 have for each layer."""
    file = model / "model.safetensors"
    tensors = load_file(file)
    for name in list(tensors):
        if name.endswith("self_attn.q_proj.weight"):
            tensors[name.replace("q_proj.weight", "rotary_emb.inv_freq")] = torch.ones(4)
        elif name.endswith("attn.c_attn.weight"):
            tensors[name.replace("c_attn.weight", "bias")] = torch.ones(1, 1, 8, 8).tril()
            tensors[name.replace("c_attn.weight", "masked_bias")] = torch.tensor(-1e4)
    save_file(tensors, file, {"format": "pt"})
    return model


def prepared(model: Path, group: RankGroup | None = None, **changes: Any) -> PreparedModel:
    ranks = {} if group is None else {"pipeline_parallel_size": group.num_stages}
    values = {"dtype": "float32", "device": "cpu", **ranks, **changes}
    settings = worker_settings(model, **values)
    return prepare_model(settings, _CPU, LoadProgress(), group)


@torch.inference_mode()
def logits_of(one: PreparedModel, logits_indices: Tensor | None = None) -> Tensor:
    """Of every token of a prompt, or of some."""
    model: ServedModel = one.model
    num_blocks = -(-NUM_TOKENS // BLOCK_SIZE)
    pool = KvPool(model.layers, PoolSize(num_blocks + 1, 0), BLOCK_SIZE, _CPU)
    attention = PagedAttention(pool.layers, one.implementation)
    model.set_attention(attention)
    batch = PagedBatch(
        block_table=torch.arange(1, num_blocks + 1, dtype=torch.int32).unsqueeze(0),
        query_start_loc=torch.tensor([0, NUM_TOKENS]),
        seq_lens=torch.tensor([NUM_TOKENS]),
        block_size=BLOCK_SIZE,
    )
    everywhere = torch.arange(NUM_TOKENS)
    attention.set_batch(batch, BLOCK_SIZE + everywhere)
    # From the beginning, the end and the middle of the vocabulary.
    ids = everywhere * 97 % VOCAB_SIZE
    ids[3] = VOCAB_SIZE - 1
    indices = everywhere if logits_indices is None else logits_indices
    return model.logits(ids, everywhere, indices)
