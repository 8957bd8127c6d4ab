"""Weights that a model's code reads past their layers: they stay as they are."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import INITIALIZER_RANGE, MAX_MODEL_LEN, VOCAB_SIZE, Reference, save_model
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import LongcatFlashConfig
from worker_driver import Driver, LaneClient, Sequence, served_model

from kernels.dispatch import cpp_implementations
from worker_svc.loading import model_preparation
from worker_svc.model.weight_packing import pack
from worker_svc.model.weight_readers import ProbedWeights, probe_weights

_PROMPT = [5, 17, 99, 3, 42, 8, 150, 61, 7, 7, 23]


class Router(nn.Module):
    """As longcat_flash's: only the weight of its layer is used."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(8, 4, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        scores = linear(states.float(), self.classifier.weight.float())
        return scores.softmax(-1)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)
        self.down = nn.Linear(8, 8, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        # A read of the dtype alone, and one of the numbers.
        states = states.to(self.up.weight.dtype)
        return torch.mm(self.up(states), self.down.weight.data)


class Mixture(nn.Module):
    """A model of one layer, which runs one expert for all tokens."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.router = Router()
        self.experts = nn.ModuleList([Expert() for _ in range(4)])
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, **unused: object) -> SimpleNamespace:
        states = self.embedding(input_ids)[0]
        chosen = int(self.router(states).sum(0).argmax())
        return SimpleNamespace(logits=self.head(self.experts[chosen](states)))


def test_a_read_past_the_layer_is_found_in_all_experts() -> None:
    torch.manual_seed(0)
    model = Mixture()
    probed = probe_weights(model)
    assert probed.is_finite
    assert probed.read_elsewhere == {model.router.classifier, *(one.down for one in model.experts)}


@pytest.mark.parametrize("implementation", cpp_implementations()[-1:])
def test_such_weights_are_kept_and_others_packed(implementation) -> None:
    torch.manual_seed(0)
    model = Mixture()
    tokens = torch.arange(16).unsqueeze(0)
    with torch.inference_mode():
        before = model(tokens).logits
        counts = pack(model, implementation, probe_weights(model).read_elsewhere)
        assert counts == {"products": 5, "kept products": 5}
        assert model.experts[0].up.weight.isnan().all()
        torch.testing.assert_close(model(tokens).logits, before)


def test_a_model_without_finite_logits_is_recognised() -> None:
    model = Mixture()
    with torch.no_grad():
        model.embedding.weight.fill_(torch.nan)
    assert not probe_weights(model).is_finite


@pytest.fixture(scope="module")
def longcat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LongcatFlashConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=INITIALIZER_RANGE,
        ffn_hidden_size=48,
        expert_ffn_hidden_size=16,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        head_dim=8,
        v_head_dim=8,
        moe_topk=2,
        n_routed_experts=4,
        zero_expert_num=2,
        routed_scaling_factor=1.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return save_model(config, tmp_path_factory.mktemp("longcat"))


async def check_output(model: Path) -> None:
    async with served_model(model) as worker:
        lane = LaneClient(worker.stub)
        await lane.open()
        sequence = Sequence(row=0, tokens=list(_PROMPT), num_prompt_tokens=len(_PROMPT))
        await Driver(lane).run([sequence], 12)
    assert sequence.tokens[len(_PROMPT) :] == Reference(model).generate(_PROMPT, 12)


async def test_longcat_flash_gives_what_transformers_gives(longcat: Path) -> None:
    await check_output(longcat)


@pytest.mark.slow
async def test_a_read_that_the_probe_did_not_show_keeps_all_weights(
    longcat: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        model_preparation, "probe_weights", lambda network: ProbedWeights(frozenset(), True)
    )
    await check_output(longcat)
    assert "the model keeps its own" in capsys.readouterr().out
