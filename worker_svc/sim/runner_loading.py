"""Creates the runner of a simulated worker."""

import json
from pathlib import Path
from typing import Any

import structlog

from worker_svc.cache.pool_size import require_capacity
from worker_svc.errors import WrongSettingError
from worker_svc.model.checkpoint import ModelError, find_model
from worker_svc.runner.multi_step import MultiStepRunner
from worker_svc.runner.step_runner import LoadedRunner
from worker_svc.settings import WorkerSettings
from worker_svc.sim.recorded_tokens import read_tokens
from worker_svc.sim.runner import Poison, SimModel, SimRunner

log = structlog.get_logger()

_DEFAULTS = SimModel()


def loaded_runner(runner: SimRunner) -> LoadedRunner:
    return LoadedRunner(MultiStepRunner(runner), runner.model.identity)


def load_runner(settings: WorkerSettings) -> LoadedRunner:
    """The runner of the settings. ModelError if the model's config.json cannot be read,
    WrongSettingError if the longest sequence does not fit into the pool."""
    if settings.num_ranks > 1:
        raise WrongSettingError(
            f"--tensor-parallel-size times --pipeline-parallel-size is {settings.num_ranks}, but a "
            "simulated worker has no ranks; leave both at 1"
        )
    model = sim_model(settings, _read_config(settings))
    require_capacity(model.num_blocks, model.block_size, model.max_model_len)
    log.info("simulated model", **vars(model))
    recorded = None if settings.sim_tokens is None else read_tokens(settings.sim_tokens)
    token_id = settings.sim_poison_token_id
    poison = None if token_id is None else Poison(token_id)
    return loaded_runner(SimRunner(model, recorded, poison))


def sim_model(settings: WorkerSettings, config: dict[str, Any]) -> SimModel:
    """Settings take precedence over the model's `config`, and that over defaults."""
    vocab_size = settings.sim_vocab_size or config.get("vocab_size")
    max_model_len = settings.max_model_len or config.get("max_position_embeddings")
    return SimModel(
        vocab_size=vocab_size or _DEFAULTS.vocab_size,
        max_model_len=max_model_len or _DEFAULTS.max_model_len,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks or _DEFAULTS.num_blocks,
        num_host_blocks=settings.sim_num_host_blocks,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        step_ms=settings.sim_step_ms,
        token_us=settings.sim_token_us,
        context_ns=settings.sim_context_ns,
        longest_jump=settings.sim_longest_jump,
        num_speculative_tokens=settings.num_speculative_tokens,
        acceptance_rate=settings.sim_acceptance_rate,
    )


def _read_config(settings: WorkerSettings) -> dict[str, Any]:
    """The text part of config.json; empty without a model."""
    if settings.model is None:
        return {}
    path: Path = find_model(settings.model, settings.revision, ["config.json"]) / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: unreadable: {error}") from error
    text: dict[str, Any] = config.get("text_config", config)
    return text
