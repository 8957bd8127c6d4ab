"""Draft models for tiny targets, and drafters of a loaded worker."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from worker_svc.runner.multi_step import MultiStepRunner
from worker_svc.runner.runner import Runner
from worker_svc.runner.sampling_params import SamplingParams
from worker_svc.runner.step_runner import LoadedRunner
from worker_svc.speculation.draft_model import DraftModel
from worker_svc.speculation.draft_passes import DraftPasses
from worker_svc.speculation.priced_lengths import DraftPrice


def save_disturbed(target: Path, folder: Path, scale: float = 0.1) -> Path:
    """A copy whose weights differ by so many of their standard deviations: it often agrees."""
    network: Any = AutoModelForCausalLM.from_pretrained(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in network.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight += noise * scale * (weight.std() if weight.numel() > 1 else 0)
    network.save_pretrained(folder)
    return folder


def save_truncated(target: Path, folder: Path, num_layers: int) -> Path:
    """A copy with the first layers alone."""
    network: Any = AutoModelForCausalLM.from_pretrained(target)
    base, config = network.base_model, network.config
    name, count = ("h", "n_layer") if hasattr(base, "h") else ("layers", "num_hidden_layers")
    setattr(base, name, getattr(base, name)[:num_layers])
    setattr(config, count, num_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    network.save_pretrained(folder)
    return folder


def runner_of(loaded: LoadedRunner) -> Runner:
    assert isinstance(loaded.runner, MultiStepRunner)
    assert isinstance(loaded.runner.runner, Runner)
    return loaded.runner.runner


def passes_of(loaded: LoadedRunner) -> DraftPasses:
    drafter = runner_of(loaded)._drafter
    assert isinstance(drafter, DraftModel)
    return drafter._passes


# Drafts cost next to nothing.
FREE = DraftPrice(plan=10, target_pass=20, token=0, draft_pass=1, verifying=0)


def free_drafts(loaded: LoadedRunner, most: int) -> DraftModel:
    """A drafter with the passes of a loaded one, whose passes cost next to nothing."""
    runner = runner_of(loaded)
    params = SamplingParams(runner._tables, torch.device("cpu"))
    passes = passes_of(loaded)
    return DraftModel(most, FREE, passes, runner._tables, params, runner._implementation)
