"""Compares the vocabularies of a model and its draft model."""

import json
from pathlib import Path
from typing import Any


def vocabulary_difference(target: Path, draft: Path) -> str | None:
    """What differs between the tokens of two `tokenizer.json`; None if nothing does, or if one of
    the files does not exist."""
    if not (target.exists() and draft.exists()):
        return None
    one, other = target.read_bytes(), draft.read_bytes()
    if one == other:
        return None
    tokens, draft_tokens = _tokens_by_id(json.loads(one)), _tokens_by_id(json.loads(other))
    different = [
        token_id
        for token_id in tokens.keys() | draft_tokens.keys()
        if tokens.get(token_id) != draft_tokens.get(token_id)
    ]
    if not different:
        return None
    first = min(different)
    return (
        f"{len(different)} tokens differ, the first is {first}: {draft_tokens.get(first)!r}, which "
        f"the model has as {tokens.get(first)!r}"
    )


def _tokens_by_id(tokenizer: dict[str, Any]) -> dict[int, str]:
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, dict):
        tokens = {token_id: token for token, token_id in vocabulary.items()}
    else:  # Unigram: pairs of a token and its score.
        tokens = {token_id: token for token_id, (token, *_) in enumerate(vocabulary)}
    return tokens | {one["id"]: one["content"] for one in tokenizer.get("added_tokens") or ()}
