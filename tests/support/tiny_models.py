"""Tiny random models, made on the spot, whose greedy outputs vary."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
)

VOCAB_SIZE = 211
MAX_MODEL_LEN = 96
# A default range repeats one token for ever.
INITIALIZER_RANGE = 0.5

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": INITIALIZER_RANGE,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

# Of families that differ in nothing but their code.
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.3,
}


def llama() -> PretrainedConfig:
    return LlamaConfig(**_COMMON)


def qwen3() -> PretrainedConfig:
    return Qwen3Config(**_COMMON, head_dim=16)


def gemma2() -> PretrainedConfig:
    """Windows of 6 tokens in every other layer, and soft caps that bite."""
    return Gemma2Config(
        **_COMMON,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    )


def gpt2() -> PretrainedConfig:
    return GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=MAX_MODEL_LEN,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )


def mixtral() -> PretrainedConfig:
    return MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2)


def gpt_oss() -> PretrainedConfig:
    """Sinks in every layer, windows in every other one."""
    return GptOssConfig(
        **_COMMON,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )


FAMILIES = {"llama": llama, "qwen3": qwen3, "gemma2": gemma2, "gpt2": gpt2}
# Of experts, of which a router chooses for each token.
MIXTURES = {"mixtral": mixtral, "gpt_oss": gpt_oss}


def random_network(config: PretrainedConfig) -> Any:
    """A model whose norms and biases are random, too: as made they are all 1, or all 0."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@torch.inference_mode()
def random_logits(model: nn.Module) -> Tensor:
    """Of the same 30 tokens for every model."""
    torch.manual_seed(1)
    logits: Tensor = model(torch.randint(VOCAB_SIZE, (1, 30)), use_cache=False).logits
    return logits


def save_model(config: PretrainedConfig, folder: Path, seed: int = 0) -> Path:
    """A model of random float32 weights in Hugging Face format."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


class Reference:
    """transformers' own greedy continuation: float32, eager attention."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        out = self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    def search(
        self, prompt: list[int], max_tokens: int, eos_token_ids: list[int], **options: Any
    ) -> list[tuple[list[int], float]]:
        """All sequences of a beam search and their scores. `options` are those of `generate`."""
        width = options["num_beams"]
        found = self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            num_return_sequences=width,
            eos_token_id=eos_token_ids,
            pad_token_id=VOCAB_SIZE - 1,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
        sequences = [self._unpadded(one[len(prompt) :].tolist(), eos_token_ids)
                     for one in found.sequences]  # fmt: skip
        return list(zip(sequences, found.sequences_scores.tolist(), strict=True))

    @staticmethod
    def _unpadded(token_ids: list[int], eos_token_ids: list[int]) -> list[int]:
        ends = [at for at, token in enumerate(token_ids) if token in eos_token_ids]
        return token_ids[: ends[0] + 1] if ends else token_ids

    def logits(self, prompt: list[int], token_ids: list[int]) -> torch.Tensor:
        """Of every token of the vocabulary at the place of each that follows the prompt."""
        with torch.no_grad():
            logits: torch.Tensor = self._model(torch.tensor([prompt + token_ids])).logits[0]
        return logits[len(prompt) - 1 : -1]

    def logprobs(self, prompt: list[int], token_ids: list[int]) -> torch.Tensor:
        """The same as log-probabilities."""
        return self.logits(prompt, token_ids).log_softmax(-1)
