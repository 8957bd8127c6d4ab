"""The model that ships, as it lies in `demo/model`."""

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.utils.chat_template_utils import render_jinja_template

from demo.corpus import collect_documents
from demo.evaluate import MAX_NEW_TOKENS, Evaluation, evaluate
from demo.train import CHAT_TEMPLATE, EOS, EOS_ID, encode, mean_loss
from gateway_svc.text.chat_template import ChatTemplate

MODEL = Path(__file__).parents[2] / "demo" / "model"
# Written for this test: no documentation string, but in the words of one.
UNSEEN = [
    "Return True if the file exists and can be read by the current user.",
    "If the argument is omitted or None, the default value is used.",
    "Raised when the connection is closed by the server before all data was sent.",
]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    loaded = AutoModelForCausalLM.from_pretrained(MODEL)
    assert isinstance(loaded, LlamaForCausalLM)
    return loaded


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return json.loads((MODEL / "TRAINING.json").read_text())


def test_the_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 8_000_000


def test_it_loads_in_float32_and_has_the_recorded_size(
    model: LlamaForCausalLM, record: dict[str, Any]
) -> None:
    assert model.dtype == torch.float32
    assert model.num_parameters() == record["parameters"]


def test_generation_ends_at_the_tokenizers_eos(
    model: LlamaForCausalLM, tokenizer: Tokenizer
) -> None:
    assert model.generation_config.eos_token_id == EOS_ID == tokenizer.token_to_id(EOS)


def test_both_libraries_read_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    text = "Return the \u00e9 and the \U0001f600  of\ta file." + EOS
    auto = AutoTokenizer.from_pretrained(MODEL)
    assert auto(text)["input_ids"] == tokenizer.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert auto.vocab_size == tokenizer.get_vocab_size()


def test_the_weights_know_the_language(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    untrained = torch.tensor(float(tokenizer.get_vocab_size())).log().item()
    assert mean_loss(model, encode(tokenizer, UNSEEN)) < 0.6 * untrained


def test_the_recorded_evaluation_passes(record: dict[str, Any]) -> None:
    assert Evaluation(**record["evaluation"]).passes()


def test_a_conversation_is_a_row_of_documents() -> None:
    messages = [
        {"role": "system", "content": "A text about files. "},
        {"role": "user", "content": " Return the"},
        {"role": "assistant", "content": " name of the file."},
        {"role": "user", "content": "If the file"},
    ]
    prompt = AutoTokenizer.from_pretrained(MODEL).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert prompt == f"A text about files.{EOS}Return the name of the file.{EOS}If the file"


def test_a_message_is_continued_as_by_transformers() -> None:
    quoting = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    for source in (
        CHAT_TEMPLATE.read_text(),
        quoting,
        quoting.replace("m.content", "m.content.rstrip()"),
        quoting.replace("m.content", "m.content | trim"),
    ):
        for content in ("Return the", "Return the ", " Return\n\n", "user", "If if If"):
            messages = [
                {"role": "user", "content": "Return the user. If if If"},
                {"role": "assistant", "content": content},
            ]
            [expected], _ = render_jinja_template(
                [messages], chat_template=source, continue_final_message=True, eos_token=EOS
            )
            template = ChatTemplate(source, {"eos_token": EOS})
            assert template.render_continued(messages) == expected
    template = ChatTemplate(quoting.replace("m.content", "m.content[1:]"), {})
    with pytest.raises(jinja2.TemplateError, match="last message"):
        template.render_continued(messages)


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(jinja2.TemplateError, match="not critic"):
        AutoTokenizer.from_pretrained(MODEL).apply_chat_template(
            [{"role": "critic", "content": "4"}], tokenize=False
        )


def test_the_shipped_template_is_the_one_in_the_source() -> None:
    assert (MODEL / "chat_template.jinja").read_text() == CHAT_TEMPLATE.read_text()


@pytest.mark.slow
def test_it_passes_its_evaluation_on_this_machine() -> None:
    measured = evaluate(MODEL, collect_documents())
    assert measured.passes(), measured
    assert measured.tokens < 50 * MAX_NEW_TOKENS
