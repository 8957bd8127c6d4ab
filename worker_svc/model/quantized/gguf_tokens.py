"""The ids at which texts begin and generation ends, as llama.cpp finds them in a GGUF file."""

from collections.abc import Mapping
from typing import Any, Final

from worker_svc.model.quantized.gguf_file import GgufFile

_BEGIN: Final = "bos_token_id"
# Of a text, of a message, and of a message that calls a tool.
_ENDS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
# llama.cpp's ids of SentencePiece vocabularies whose files have none.
_OF_SENTENCEPIECE: Final[Mapping[str, int]] = {_BEGIN: 1, "eos_token_id": 2}
# llama.cpp ends generation at these wherever a vocabulary has them: files often name the end of a
# text only, and messages of a conversation have another.
_END_TOKENS: Final = (
    *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>"),
    *("<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]"),
)


def set_special_ids(config: Any, file: GgufFile, vocabulary: Mapping[str, int]) -> None:
    """Give the config the file's ids, in place of its class's defaults. `vocabulary` has the ids of
    tokens. Ids for which the model has no row are ignored."""
    found = [_id_of(file, key) for key in _ENDS]
    found += [vocabulary.get(token) for token in _END_TOKENS]
    # Without duplicates, that of the end of a text first.
    ends = [id_ for id_ in dict.fromkeys(found) if _is_row(id_, config)]
    config.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)
    begin = _id_of(file, _BEGIN)
    config.bos_token_id = begin if _is_row(begin, config) else None


def _id_of(file: GgufFile, key: str) -> Any:
    """None for lists, and without a value."""
    kind = file.metadata.get("tokenizer.ggml.model")
    default = _OF_SENTENCEPIECE.get(key) if kind == "llama" else None
    return file.metadata.get(f"tokenizer.ggml.{key}", default)


def _is_row(id_: Any, config: Any) -> bool:
    return type(id_) is int and 0 <= id_ < config.vocab_size
