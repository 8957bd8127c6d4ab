"""Trains the demo model and its tokenizer on the corpus: `python -m demo.train`.

A Llama of 3.5 million parameters with a byte-level BPE vocabulary, in minutes on two cores. Weights
are trained in float32 and stored in float16; the config has float32, so that they load as such.
"""

import argparse
import json
import math
import platform
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from demo.corpus import collect_documents, digest
from demo.evaluate import evaluate

EOS = "<|endoftext|>"
EOS_ID = 0  # the first special token of the trainer
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


@dataclass(frozen=True)
class Recipe:
    """All parameters of the model and its training, apart from the corpus."""

    seed: int = 20
    vocab_size: int = 3072
    hidden_size: int = 256
    intermediate_size: int = 640
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    max_position_embeddings: int = 1024
    held_out: float = 0.05
    epochs: int = 8
    tokens_per_row: int = 512
    rows_per_step: int = 4
    warmup_steps: int = 60
    learning_rate: float = 3e-3
    weight_decay: float = 0.1


def train(recipe: Recipe, folder: Path) -> None:
    """Write the model folder, including the evaluation in `TRAINING.json`."""
    started = time.monotonic()
    torch.manual_seed(recipe.seed)
    documents = collect_documents()
    training, held_out = split(documents, recipe)
    tokenizer = train_tokenizer(training, recipe.vocab_size)
    encoded = encode(tokenizer, training)
    model = build_model(recipe)
    steps, train_loss = fit(model, encoded, recipe)
    held_out_loss = mean_loss(model, encode(tokenizer, held_out))
    duration = time.monotonic() - started
    save(model, tokenizer, folder)
    record = {
        "recipe": asdict(recipe),
        "parameters": model.num_parameters(),
        "corpus": {
            "documents": len(documents),
            "characters": sum(map(len, documents)),
            "training_tokens": sum(map(len, encoded)),
            "sha256": digest(documents),
        },
        "steps": steps,
        "train_loss": round(train_loss, 4),
        "held_out_loss": round(held_out_loss, 4),
        "duration_s": round(duration),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "evaluation": asdict(evaluate(folder, documents)),
    }
    write_json(folder / "TRAINING.json", record)


def split(documents: list[str], recipe: Recipe) -> tuple[list[str], list[str]]:
    """The training documents and those held out, drawn by the recipe's seed."""
    shuffled = random.Random(recipe.seed).sample(documents, len(documents))
    num_held_out = round(recipe.held_out * len(documents))
    return shuffled[num_held_out:], shuffled[:num_held_out]


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer: every text encodes, and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str]) -> list[list[int]]:
    """The token ids of each document, with EOS at the end."""
    return [[*encoding.ids, EOS_ID] for encoding in tokenizer.encode_batch_fast(documents)]


def build_model(recipe: Recipe) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        max_position_embeddings=recipe.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
    )
    return LlamaForCausalLM(config)


def fit(model: LlamaForCausalLM, encoded: list[list[int]], recipe: Recipe) -> tuple[int, float]:
    """AdamW under a cosine schedule; the steps taken and the mean loss of the last epoch."""
    batches = list(make_batches(encoded, recipe))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": norms, "weight_decay": 0.0}],
        lr=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        betas=(0.9, 0.95),
        fused=True,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: schedule(step, recipe.warmup_steps, len(batches))
    )
    model.train()
    losses = []
    for step, batch in enumerate(batches, start=1):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step}/{len(batches)}  loss {sum(losses[-20:]) / 20:.3f}", flush=True)
    last_epoch = losses[-(len(losses) // recipe.epochs) :]
    return len(losses), sum(last_epoch) / len(last_epoch)


def make_batches(encoded: list[list[int]], recipe: Recipe) -> Iterator[torch.Tensor]:
    """Token ids [rows_per_step, tokens_per_row], each epoch in a new order."""
    order = random.Random(recipe.seed)
    rows = [
        row
        for _ in range(recipe.epochs)
        for row in pack(order.sample(encoded, len(encoded)), recipe.tokens_per_row)
    ]
    for start in range(0, len(rows) - recipe.rows_per_step + 1, recipe.rows_per_step):
        yield torch.tensor(rows[start : start + recipe.rows_per_step])


def pack(encoded: list[list[int]], tokens_per_row: int) -> Iterator[list[int]]:
    """Full rows of whole documents: each begins with a document; the last one is truncated."""
    row: list[int] = []
    for document in encoded:
        row += document
        if len(row) >= tokens_per_row:
            yield row[:tokens_per_row]
            row = []


def schedule(step: int, warmup_steps: int, num_steps: int) -> float:
    """Factor of the learning rate: a linear warm-up, then half a cosine to 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / (num_steps - warmup_steps)))


@torch.inference_mode()
def mean_loss(model: LlamaForCausalLM, encoded: list[list[int]]) -> float:
    """Nats per predicted token, each document evaluated alone."""
    model.eval()
    total = 0.0
    for document in encoded:
        ids = torch.tensor([document])
        total += model(input_ids=ids, labels=ids).loss.item() * (len(document) - 1)
    return total / sum(len(document) - 1 for document in encoded)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the weights in float16, the configs, the tokenizer and the chat template."""
    model.half().save_pretrained(folder)
    config = LlamaConfig.from_pretrained(folder)
    config.dtype = torch.float32
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=EOS_ID, pad_token_id=EOS_ID).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": EOS,
        "padding_side": "left",
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    shutil.copyfile(CHAT_TEMPLATE, folder / "chat_template.jinja")


def write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).with_name("model"))
    train(Recipe(), parser.parse_args().folder)


if __name__ == "__main__":
    main()
