"""The characters of a text before each of its tokens."""

from collections.abc import Sequence

from gateway_svc.text.detokenizer import Detokenizer, Vocabulary


def text_offsets(vocabulary: Vocabulary, token_ids: Sequence[int], text: str) -> list[int]:
    """One per token: where its text begins in `text`, to which special tokens may have been added.
    A token that begins within a character has the offset of that character."""
    detokenizer = Detokenizer(vocabulary, skip_special_tokens=False)
    pieces: list[str] = []
    offsets: list[int] = []
    num_characters = 0
    for token_id in token_ids:
        offsets.append(num_characters)
        pieces.append(detokenizer.push([token_id]))
        num_characters += len(pieces[-1])
    decoded = "".join([*pieces, detokenizer.flush()])
    num_added = max(0, decoded.find(text))
    return [min(max(0, offset - num_added), len(text)) for offset in offsets]
