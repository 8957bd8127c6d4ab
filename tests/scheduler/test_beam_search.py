"""The search alone: worked cases, the log that it is recovered from, and transformers' results."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from quire.service.beams import BeamStep, Continuation, hypotheses_of, num_entries
from scheduler_svc.beams.search import BeamSearch, EarlyStopping, SearchParams

VOCAB_SIZE, EOS, OTHER_EOS, PAD = 24, 3, 7, 23
EARLY_STOPPING = {False: EarlyStopping.HEURISTIC, True: EarlyStopping.ALWAYS,
                  "never": EarlyStopping.NEVER}  # fmt: skip


def search(width=2, max_tokens=9, length_penalty=1.0, early_stopping=False, stops=(EOS,)):
    params = SearchParams(
        width, max_tokens, length_penalty, EARLY_STOPPING[early_stopping], frozenset(stops)
    )
    return BeamSearch(params)


def outputs(found: BeamSearch) -> list[tuple[list[int], float]]:
    return [(list(one.token_ids), round(one.score, 4)) for one in found.hypotheses]


def test_the_best_continuations_of_all_beams_go_on():
    found = search()
    first = found.advance([[(5, -1.0), (6, -2.0), (EOS, -3.0)]])
    assert first == BeamStep((Continuation(0, 5, -1.0), Continuation(0, 6, -2.0)), ())
    second = found.advance([[(1, -0.5), (2, -0.75), (4, -9.0)], [(1, -0.125), (2, -3.0)]])
    assert second.running == (Continuation(0, 1, -1.5), Continuation(0, 2, -1.75))
    assert [list(found.path(beam)) for beam in range(2)] == [[5, 1], [5, 2]]
    assert not found.is_done


def test_a_hypothesis_counts_if_it_is_among_the_best_candidates():
    found = search(width=1)
    step = found.advance([[(5, -1.0), (EOS, -2.0)]])
    assert not step.finished
    step = found.advance([[(EOS, -1.0), (6, -2.0)]])
    assert step.finished == (Continuation(0, EOS, -2.0),)
    assert outputs(found) == [([5, EOS], -1.0)]
    # The best beam has -3 in 2 tokens: no better than the hypothesis.
    assert found.is_done


def test_the_score_is_divided_by_a_power_of_the_number_of_tokens():
    found = search(width=1, length_penalty=2.0)
    found.advance([[(5, -1.0), (EOS, -2.0)]])
    found.advance([[(EOS, -3.0), (6, -3.5)]])
    assert outputs(found) == [([5, EOS], -1.0)]


def test_all_candidates_of_the_last_step_are_hypotheses():
    found = search(width=2, max_tokens=1)
    step = found.advance([[(5, -1.0), (6, -2.0), (8, -3.0)]])
    assert step.running == ()
    assert outputs(found) == [([5], -1.0), ([6], -2.0)]
    assert found.is_done


@pytest.mark.parametrize(("early_stopping", "is_done"), [(False, False), (True, True),
                                                         ("never", False)])  # fmt: skip
def test_early_stopping_ends_a_search_with_enough_hypotheses(early_stopping, is_done):
    found = search(width=1, early_stopping=early_stopping, length_penalty=0.0)
    found.advance([[(EOS, -1.0), (5, -1.0)]])
    # The beam is as likely as the hypothesis: only a better one goes on.
    assert found.is_done
    found = search(width=1, early_stopping=early_stopping)
    found.advance([[(5, -1.0), (EOS, -2.0)]])
    found.advance([[(EOS, -2.0), (6, -2.0)]])
    found = search(width=1, early_stopping=early_stopping, length_penalty=2.0)
    found.advance([[(EOS, -1.0), (5, -1.5)]])
    # -1.5 / 1 is worse than -1, but -1.5 / 9**2 is not.
    assert found.is_done is (is_done or early_stopping is False)


def test_equal_candidates_are_in_order_of_beams_and_tokens():
    found = search(width=2)
    step = found.advance([[(9, -1.0), (5, -1.0), (6, -1.0)]])
    assert [one.token_id for one in step.running] == [5, 6]
    step = found.advance([[(9, -1.0), (2, -1.0), (1, -1.0)], [(0, -1.0), (4, -1.0), (8, -1.0)]])
    assert step.running == (Continuation(0, 1, -2.0), Continuation(0, 2, -2.0))


def test_a_step_is_packed_and_unpacked():
    step = BeamStep((Continuation(1, 2**31, -1.5), Continuation(0, 7, -2.25)),
                    (Continuation(1, EOS, -1.0),))  # fmt: skip
    packed = step.pack(2)
    assert len(packed) == num_entries(2) * 12
    assert BeamStep.unpack(packed) == step
    assert BeamStep.unpack(BeamStep((), (Continuation(0, 1, -1.0),)).pack(3)).running == ()
    for wrong in (b"", packed[:-1], packed[:-12]):
        with pytest.raises(ValueError, match="no step"):
            BeamStep.unpack(wrong)


class TableModel(PreTrainedModel, GenerationMixin):
    """Logits are a function of the last two tokens and the position."""

    config_class = PretrainedConfig

    def __init__(self, seed: int) -> None:
        super().__init__(PretrainedConfig(vocab_size=VOCAB_SIZE, is_encoder_decoder=False,
                                          num_hidden_layers=1))  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE, generator=generator) * 2
        self.places = torch.randn(64, VOCAB_SIZE, generator=generator)
        self.anchor = torch.nn.Parameter(torch.zeros(1))
        # End-of-sequence tokens are likely.
        self.table[:, :, [EOS, OTHER_EOS]] += 1.5

    def forward(self, input_ids: Tensor, **_: object) -> CausalLMOutputWithPast:
        before = torch.cat([torch.zeros_like(input_ids[:, :1]), input_ids[:, :-1]], 1)
        logits = self.table[before, input_ids] + self.places[: input_ids.shape[1]]
        return CausalLMOutputWithPast(logits=logits)

    def candidates(self, token_ids: list[int], count: int) -> list[tuple[int, float]]:
        logits = self(torch.tensor([token_ids])).logits[0, -1]
        top = logits.log_softmax(-1).topk(count)
        return list(zip(top.indices.tolist(), top.values.tolist(), strict=True))


def cases() -> Iterator[tuple[int, int, float, object, tuple[int, ...]]]:
    combinations = product(
        (2, 3, 4, 8),
        (0.0, 0.6, 1.0, 2.0, -1.0),
        (False, True, "never"),
        ((EOS,), (EOS, OTHER_EOS)),
    )
    for seed, case in enumerate(combinations):
        yield (seed, *case)


@pytest.mark.parametrize("max_tokens", [1, 2, 12])
def test_searches_equal_those_of_transformers(max_tokens):
    prompt, num_ended_early = [5, 1, 2], 0
    for seed, width, length_penalty, early_stopping, stops in cases():
        model = TableModel(seed)
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, 3, dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=max_tokens,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=list(stops),
            pad_token_id=PAD,
            do_sample=False,
            use_cache=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        found = search(width, max_tokens, length_penalty, early_stopping, stops)
        while not found.is_done:
            paths = [[*prompt, *found.path(beam)] for beam in range(found.num_running)]
            found.advance([model.candidates(path, width + len(stops)) for path in paths])
        num_ended_early += len(found.steps) < max_tokens
        case = (seed, width, length_penalty, early_stopping, stops)
        assert len(found.hypotheses) == width, case
        for one, tokens, score in zip(
            found.hypotheses, expected.sequences, expected.sequences_scores, strict=True
        ):
            whole = [*prompt, *one.token_ids]
            assert tokens.tolist() == whole + [PAD] * (len(tokens) - len(whole)), case
            assert one.score == pytest.approx(float(score), abs=1e-5), case
        _check_log(found)
    assert num_ended_early > 30 or max_tokens < 12


def _check_log(found: BeamSearch) -> None:
    """The packed steps alone give the hypotheses, and a search that goes on from any of them."""
    params = found.params
    packed = [step.pack(params.width) for step in found.steps]
    steps = [BeamStep.unpack(one) for one in packed]
    assert steps == found.steps
    assert hypotheses_of(steps, params.width, params.length_penalty) == found.hypotheses
    again = BeamSearch(params)
    for step in steps:
        assert not again.is_done
        again.add(step)
    assert again.is_done
