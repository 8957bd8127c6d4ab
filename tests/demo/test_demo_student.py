import json
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from demo.student import (
    Agreement,
    StudentRecipe,
    batches,
    distil,
    divergence,
    has_student,
    measure,
    new_student,
)
from demo.train import Recipe, build_model

TINY = StudentRecipe(
    hidden_size=16,
    intermediate_size=32,
    num_heads=1,
    steps=30,
    tokens_per_row=16,
    rows_per_step=2,
    warmup_steps=2,
    learning_rate=1e-2,
)
ENCODED = [[1, 2, 3, 4, 5, 6, 7, 0], [3, 1, 4, 1, 5, 9, 2, 6, 0], [2, 7, 1, 8, 0]]


@pytest.fixture(scope="module")
def teacher() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 1}
    return build_model(replace(Recipe(), num_layers=1, **shape)).eval()


def test_a_student_learns_what_its_teacher_expects(teacher: LlamaForCausalLM) -> None:
    torch.manual_seed(0)
    student = new_student(teacher, TINY)
    assert student.config.hidden_size == TINY.hidden_size
    assert student.config.vocab_size == teacher.config.vocab_size
    batch = next(batches(ENCODED, TINY))
    before = divergence(student, teacher, batch).item()
    assert distil(student, teacher, ENCODED, TINY) < before / 2
    assert divergence(teacher, teacher, batch).item() == pytest.approx(0, abs=1e-5)


def test_rows_go_on_for_ever_in_the_same_orders() -> None:
    first, second = ([*islice(batches(ENCODED, TINY), 5)] for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert {tuple(rows.shape) for rows in first} == {(2, 16)}


def test_a_model_agrees_with_itself(teacher: LlamaForCausalLM) -> None:
    begun = torch.tensor([[0, 5], [0, 9]])
    assert measure(teacher, teacher, begun, num_tokens=8) == Agreement(1.0, 1.0)
    student = new_student(teacher, TINY).eval()
    assert measure(student, teacher, begun, num_tokens=8).sampled < 1


def test_a_student_is_kept_until_its_recipe_changes(tmp_path: Path) -> None:
    assert not has_student(tmp_path, TINY)
    (tmp_path / "TRAINING.json").write_text(json.dumps({"recipe": asdict(TINY)}))
    assert has_student(tmp_path, TINY)
    assert not has_student(tmp_path, replace(TINY, steps=31))
