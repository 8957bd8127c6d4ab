"""Locates and reads the files of a model: configs, tokenizer and chat template."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gateway_svc.text.chat_template import ChatTemplate
from quire.service.model_files import TEXT_FILES, local_folder


class ModelFilesError(Exception):
    """The model cannot be served; the message names the file and the reason."""


@dataclass(frozen=True)
class ModelFiles:
    """The contents of a model's files that the gateway uses."""

    tokenizer: Tokenizer
    # Token ids are below this.
    vocab_size: int
    # Positions the model was trained for; None if the config has none.
    max_positions: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: ChatTemplate | None
    # Of conversations with tools, if the model has one for them.
    tool_template: ChatTemplate | None = None
    # That the configs name. Files of tokenizers may have them as tokens that are not special.
    special_tokens: frozenset[str] = frozenset()
    # The text of each that has a name, such as `eos_token`.
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    # transformers' class; None if the config has none.
    tokenizer_class: str | None = None

    @property
    def template_source(self) -> str:
        """Of all templates; empty without any."""
        found = (self.tool_template, self.chat_template)
        return "\n".join(template.source for template in found if template is not None)


def load(model: str, revision: str | None) -> ModelFiles:
    """Read a folder or, if none of that name exists, a hub id. ModelFilesError if it cannot."""
    folder = _folder(model, revision)
    try:
        return _read(folder)
    except ModelFilesError:
        raise
    except Exception as error:
        # The tokenizer library raises bare exceptions, all of them about these files.
        raise ModelFilesError(f"{folder}: {type(error).__name__}: {error}") from error


def _folder(model: str, revision: str | None) -> Path:
    try:
        if (folder := local_folder(model)) is not None:
            return folder
    except ValueError as error:
        raise ModelFilesError(str(error)) from error
    # It takes a tenth of a second to import.
    hub = import_module("huggingface_hub")
    try:
        return Path(
            hub.snapshot_download(model, revision=revision, allow_patterns=list(TEXT_FILES))
        )
    except Exception as error:
        # Anything the hub's client raises: an unknown id, no network, no permission.
        reason = str(error).partition("\n")[0]
        raise ModelFilesError(f"{model}: no such folder; hub download failed: {reason}") from error


def _read(folder: Path) -> ModelFiles:
    config = _required_json(folder / "config.json")
    generation_config = _json(folder / "generation_config.json")
    tokenizer_config = _json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(_json(folder / "special_tokens_map.json")) | _special_tokens(
        tokenizer_config
    )
    tokenizer = _tokenizer(folder, tokenizer_config)
    templates = {
        name: ChatTemplate(source, special_tokens)
        for name, source in _chat_templates(folder, tokenizer_config).items()
        if name in ("default", "tool_use")
    }
    vocab_size = _first(config, "vocab_size") or tokenizer.get_vocab_size()
    eos_token_ids = _eos_token_ids(generation_config, config) or _eos_of_tokenizer(
        tokenizer, special_tokens
    )
    return ModelFiles(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        max_positions=_first(config, "max_position_embeddings", "n_positions"),
        # Some configs have -1 for none, or tokens for which the model has no row.
        eos_token_ids=tuple(id_ for id_ in eos_token_ids if 0 <= id_ < vocab_size),
        chat_template=templates.get("default"),
        tool_template=templates.get("tool_use"),
        special_tokens=_marked_special(tokenizer_config, special_tokens),
        named_tokens=special_tokens,
        tokenizer_class=tokenizer_config.get("tokenizer_class"),
    )


def _tokenizer(folder: Path, tokenizer_config: Mapping[str, Any]) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        slow = sorted(_names(folder, ("tokenizer*.model", "*.model", "*.tiktoken", "vocab.*")))
        name = tokenizer_config.get("tokenizer_class", "its tokenizer")
        form = f"; {name} exists only in slow form ({', '.join(slow)})" if slow else ""
        raise ModelFilesError(f"{path}: no such file{form}")
    tokenizer = Tokenizer.from_file(str(path))
    # Settings of a training run, saved with the vocabulary.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _names(folder: Path, patterns: Iterable[str]) -> set[str]:
    return {path.name for pattern in patterns for path in folder.glob(pattern)}


def _chat_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """By name, as transformers reads them: of files, or else of the config."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        others = (folder / "additional_chat_templates").glob("*.jinja")
        paths = {"default": path, **{other.stem: other for other in others}}
        return {name: one.read_text(encoding="utf-8") for name, one in paths.items()}
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {} if template is None else {"default": template}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens such as bos_token, which configs store as text or as an object."""
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    contents = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in tokens.items()
    }
    return {key: value for key, value in contents.items() if isinstance(value, str)}


def _marked_special(
    tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> frozenset[str]:
    """The special tokens of the config's list by id, or, without one, those that have names. As in
    transformers 5."""
    by_id = tokenizer_config.get("added_tokens_decoder")
    if by_id is None:
        return frozenset(special_tokens.values())
    return frozenset(token["content"] for token in by_id.values() if token.get("special"))


def _eos_token_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the end-of-sequence ids of the first config that has them."""
    for config in configs:
        for level in _levels(config):
            ids = level.get("eos_token_id")
            if ids is not None:
                return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


def _eos_of_tokenizer(tokenizer: Tokenizer, special_tokens: Mapping[str, str]) -> tuple[int, ...]:
    """The end-of-sequence token of a model whose configs have none, as in vLLM and SGLang."""
    token_id = tokenizer.token_to_id(special_tokens.get("eos_token", ""))
    return () if token_id is None else (token_id,)


def _first(config: Mapping[str, Any], *keys: str) -> int | None:
    values = (level.get(key) for level in _levels(config) for key in keys)
    return next((int(value) for value in values if value is not None), None)


def _levels(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The config, and its `text_config`, where multimodal models keep the language model's."""
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
