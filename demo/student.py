"""Trains a student of the demo model, a draft model for speculative decoding:
`python -m demo.student`.

One layer and half the hidden size: 0.6 million parameters, a sixth of the demo model's. It learns
the demo model's distribution of the next token over the demo's corpus (knowledge distillation,
Hinton, 2015), in some two minutes on two cores.
"""

import argparse
import json
import platform
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import LlamaForCausalLM

from demo.corpus import collect_documents
from demo.evaluate import PROMPTS
from demo.train import EOS_ID, Recipe, build_model, encode, pack, save, schedule, split, write_json

TEACHER = Path(__file__).with_name("model")
_RECORD = "TRAINING.json"


@dataclass(frozen=True)
class StudentRecipe:
    """All parameters of the student and its training, apart from the corpus and the teacher."""

    seed: int = 20
    hidden_size: int = 128
    intermediate_size: int = 320
    num_layers: int = 1
    num_heads: int = 2
    num_kv_heads: int = 1
    steps: int = 700
    tokens_per_row: int = 256
    rows_per_step: int = 4
    warmup_steps: int = 30
    learning_rate: float = 4e-3
    weight_decay: float = 0.01

    def of_training(self) -> Recipe:
        """The demo model's recipe with the student's shape and steps."""
        own = asdict(self)
        shared = {name: own[name] for name in asdict(Recipe()) if name in own}
        return replace(Recipe(), **shared)


@dataclass(frozen=True)
class Agreement:
    """The share of tokens in the teacher's texts that the student would write as well."""

    greedy: float
    sampled: float  # at TEMPERATURE, with the same noise


TEMPERATURE = 0.8


def train(recipe: StudentRecipe, folder: Path) -> Agreement:
    """Write the student's folder, with its agreement in `TRAINING.json`."""
    began = time.monotonic()
    # Steps are small: with more threads, a busy core delays each of their operations.
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    teacher = LlamaForCausalLM.from_pretrained(TEACHER).eval()
    tokenizer = Tokenizer.from_file(str(TEACHER / "tokenizer.json"))
    documents, _ = split(collect_documents(), Recipe())
    student = new_student(teacher, recipe)
    loss = distil(student, teacher, encode(tokenizer, documents), recipe)
    agreement = measure(student, teacher, first_tokens(tokenizer))
    duration = time.monotonic() - began
    folder.mkdir(parents=True, exist_ok=True)
    save(student, tokenizer, folder)
    record = {
        "recipe": asdict(recipe),
        "parameters": student.num_parameters(),
        "train_loss": round(loss, 4),
        "agreement": asdict(agreement),
        "duration_s": round(duration),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    write_json(folder / _RECORD, record)
    return agreement


def new_student(teacher: LlamaForCausalLM, recipe: StudentRecipe) -> LlamaForCausalLM:
    """Its embedding is the teacher's in the directions in which that varies most."""
    student = build_model(recipe.of_training())
    embedding = teacher.model.embed_tokens.weight.detach()
    directions = torch.linalg.svd(embedding, full_matrices=False).Vh[: recipe.hidden_size]
    with torch.no_grad():
        student.model.embed_tokens.weight.copy_(embedding @ directions.T)
    return student


def distil(
    student: LlamaForCausalLM,
    teacher: LlamaForCausalLM,
    encoded: list[list[int]],
    recipe: StudentRecipe,
) -> float:
    """AdamW under a cosine schedule; the mean divergence of the last tenth, in nats per token."""
    optimizer = torch.optim.AdamW(
        student.parameters(),
        lr=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        betas=(0.9, 0.95),
        fused=True,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: schedule(step, recipe.warmup_steps, recipe.steps)
    )
    student.train()
    losses = []
    for step, batch in zip(range(1, recipe.steps + 1), batches(encoded, recipe), strict=False):
        loss = divergence(student, teacher, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"step {step}/{recipe.steps}  loss {sum(losses[-50:]) / 50:.3f}", flush=True)
    student.eval()
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def batches(encoded: list[list[int]], recipe: StudentRecipe) -> Iterator[Tensor]:
    """Token ids [rows_per_step, tokens_per_row] without end, each epoch in a new order."""
    order = random.Random(recipe.seed)
    rows: list[list[int]] = []
    while True:
        for row in pack(order.sample(encoded, len(encoded)), recipe.tokens_per_row):
            rows.append(row)
            if len(rows) == recipe.rows_per_step:
                yield torch.tensor(rows)
                rows = []


def divergence(student: LlamaForCausalLM, teacher: LlamaForCausalLM, batch: Tensor) -> Tensor:
    """Kullback-Leibler, of the student's next tokens from the teacher's, in nats per token."""
    with torch.no_grad():
        wanted = teacher(input_ids=batch, use_cache=False).logits.log_softmax(-1)
    found = student(input_ids=batch, use_cache=False).logits.log_softmax(-1)
    flat = (found.flatten(0, 1), wanted.flatten(0, 1))
    return kl_div(*flat, log_target=True, reduction="batchmean")


def first_tokens(tokenizer: Tokenizer) -> Tensor:
    """EOS and the first token of each prompt of the evaluation."""
    encoded = tokenizer.encode_batch_fast(list(PROMPTS))
    return torch.tensor([[EOS_ID, encoding.ids[0]] for encoding in encoded])


@torch.inference_mode()
def measure(
    student: LlamaForCausalLM, teacher: LlamaForCausalLM, begun: Tensor, num_tokens: int = 128
) -> Agreement:
    """On texts that the teacher writes behind `begun`, as rows of ids."""
    shares = []
    for temperature in (0.0, TEMPERATURE):
        texts = teacher.generate(
            input_ids=begun,
            attention_mask=torch.ones_like(begun),
            do_sample=temperature > 0,
            temperature=temperature or 1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
        )
        wanted, found = (model(input_ids=texts).logits[:, 1:-1] for model in (teacher, student))
        if temperature:
            noise = -torch.log(-torch.log(torch.rand_like(wanted).clamp_(1e-9, 1 - 1e-7)))
            wanted, found = wanted / temperature + noise, found / temperature + noise
        shares.append((wanted.argmax(-1) == found.argmax(-1)).float().mean().item())
    return Agreement(*(round(share, 3) for share in shares))


def has_student(folder: Path, recipe: StudentRecipe) -> bool:
    """Whether the folder has a student of the same recipe."""
    record = folder / _RECORD
    return record.exists() and json.loads(record.read_text())["recipe"] == asdict(recipe)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).parents[1] / ".cache/demo-student"
    parser.add_argument("--folder", type=Path, default=default)
    parser.add_argument("--keep", action="store_true", help="keep a student of the same recipe")
    options, recipe = parser.parse_args(), StudentRecipe()
    if not (options.keep and has_student(options.folder, recipe)):
        print(train(recipe, options.folder))


if __name__ == "__main__":
    main()
