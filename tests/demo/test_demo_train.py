import pytest
import torch

from demo.train import (
    EOS,
    EOS_ID,
    Recipe,
    build_model,
    encode,
    fit,
    make_batches,
    mean_loss,
    pack,
    schedule,
    split,
    train_tokenizer,
)

TEXTS = [f"Return the {word} of the file." for word in ("name", "size", "mode", "owner", "path")]
TINY = Recipe(
    vocab_size=280,
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    epochs=2,
    tokens_per_row=32,
    rows_per_step=2,
    warmup_steps=2,
    learning_rate=1e-2,
)


def test_held_out_documents_are_never_trained_on() -> None:
    documents = [str(number) for number in range(100)]
    training, held_out = split(documents, Recipe())
    assert len(held_out) == 5
    assert sorted(training + held_out) == sorted(documents)
    assert split(documents, Recipe()) == (training, held_out)


def test_the_tokenizer_is_a_function_of_its_texts() -> None:
    assert train_tokenizer(TEXTS, 280).to_str() == train_tokenizer(TEXTS, 280).to_str()


def test_every_text_survives_the_tokenizer_and_ends_by_eos() -> None:
    tokenizer = train_tokenizer(TEXTS, 280)
    text = "Tab\t, two  spaces, \u00e9 and \U0001f600."
    [ids] = encode(tokenizer, [text])
    assert ids[-1] == EOS_ID == tokenizer.token_to_id(EOS)
    assert tokenizer.decode(ids) == text


def test_rows_are_full_and_begin_with_a_document() -> None:
    assert list(pack([[1, 2, 0], [3, 0], [4, 5, 6, 7, 0], [8, 0]], 4)) == [
        [1, 2, 0, 3],
        [4, 5, 6, 7],
    ]


def test_batches_differ_between_epochs_and_not_between_runs() -> None:
    encoded = encode(train_tokenizer(TEXTS, 280), TEXTS * 4)
    batches = torch.stack(list(make_batches(encoded, TINY)))
    assert batches.shape[1:] == (2, 32)
    assert torch.equal(batches, torch.stack(list(make_batches(encoded, TINY))))
    assert not torch.equal(batches[0], batches[len(batches) // 2])


def test_the_learning_rate_warms_up_and_falls_to_nothing() -> None:
    factors = [schedule(step, 10, 100) for step in range(101)]
    assert factors[9] == factors[10] == 1
    assert factors[:10] == sorted(factors[:10])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[100] == pytest.approx(0)


def test_training_lowers_the_loss_and_repeats_itself() -> None:
    encoded = encode(train_tokenizer(TEXTS, 280), TEXTS * 8)

    def run() -> tuple[float, float]:
        torch.manual_seed(0)
        model = build_model(TINY)
        before = mean_loss(model, encoded)
        fit(model, encoded, TINY)
        return before, mean_loss(model, encoded)

    before, after = run()
    assert after < 0.7 * before
    assert run() == (before, after)
