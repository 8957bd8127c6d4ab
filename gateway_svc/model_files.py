"""A model's own files: where they are, and what the gateway reads of them."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from tokenizers import Tokenizer

from gateway_svc.chat_template import ChatTemplate

# No weights: what a tokenizer and its chat template are made of, in any form.
_PATTERNS = ["*.json", "*.jinja", "tokenizer*", "*.model", "*.tiktoken", "vocab.txt", "merges.txt"]


class ModelFilesError(Exception):
    """The model cannot be served; the message says why and names the file."""


@dataclass(frozen=True)
class ModelFiles:
    """What the gateway knows of a model."""

    tokenizer: Tokenizer
    # Token ids are below this.
    vocab_size: int
    # Positions the model was made for; None if it does not say.
    max_positions: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: ChatTemplate | None


def load(model: str, revision: str | None) -> ModelFiles:
    """Reads a folder or, if there is none of that name, a hub id. ModelFilesError if it cannot."""
    folder = _folder(model, revision)
    try:
        return _read(folder)
    except ModelFilesError:
        raise
    except Exception as error:
        # The tokenizer library raises bare exceptions; each of them is about these files.
        raise ModelFilesError(f"{folder}: {type(error).__name__}: {error}") from error


def _folder(model: str, revision: str | None) -> Path:
    if Path(model).is_dir():
        return Path(model)
    if model.startswith((".", "/", "~")):
        raise ModelFilesError(f"{model}: no such folder")
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=_PATTERNS))
    except Exception as error:
        # Whatever the hub's client raises: an unknown id, no network, no permission.
        reason = str(error).partition("\n")[0]
        raise ModelFilesError(f"{model}: no such folder, and not from the hub: {reason}") from error


def _read(folder: Path) -> ModelFiles:
    config = _required_json(folder / "config.json")
    generation_config = _json(folder / "generation_config.json")
    tokenizer_config = _json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(_json(folder / "special_tokens_map.json")) | _special_tokens(
        tokenizer_config
    )
    tokenizer = _tokenizer(folder, tokenizer_config)
    source = _chat_template(folder, tokenizer_config)
    return ModelFiles(
        tokenizer=tokenizer,
        vocab_size=_first(config, "vocab_size") or tokenizer.get_vocab_size(),
        max_positions=_first(config, "max_position_embeddings", "n_positions"),
        eos_token_ids=_eos_token_ids(generation_config, config),
        chat_template=None if source is None else ChatTemplate(source, special_tokens),
    )


def _tokenizer(folder: Path, tokenizer_config: Mapping[str, Any]) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        slow = sorted(_names(folder, ("tokenizer*.model", "*.model", "*.tiktoken", "vocab.*")))
        name = tokenizer_config.get("tokenizer_class", "its tokenizer")
        form = f"; {name} exists only in slow form ({', '.join(slow)})" if slow else ""
        raise ModelFilesError(f"{path}: no such file{form}")
    tokenizer = Tokenizer.from_file(str(path))
    # Settings of somebody's training run, saved with the vocabulary.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _names(folder: Path, patterns: Iterable[str]) -> set[str]:
    return {path.name for pattern in patterns for path in folder.glob(pattern)}


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and their like, which files write as text or as an object."""
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    contents = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in tokens.items()
    }
    return {key: value for key, value in contents.items() if isinstance(value, str)}


def _eos_token_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    """Of the first config that has them."""
    for config in configs:
        for level in _levels(config):
            ids = level.get("eos_token_id")
            if ids is not None:
                return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


def _first(config: Mapping[str, Any], *keys: str) -> int | None:
    values = (level.get(key) for level in _levels(config) for key in keys)
    return next((int(value) for value in values if value is not None), None)


def _levels(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A model of several parts keeps its language model's numbers in `text_config`."""
    nested = config.get("text_config")
    return [config, nested] if isinstance(nested, dict) else [config]


def _required_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelFilesError(f"{path}: no such file")
    return _json(path)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path}: not a JSON object")
    return value
