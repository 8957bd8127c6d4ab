"""Small tokenizers that the grammar library reads."""

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

# The last ids of `byte_level`.
SPECIAL = ("<|end|>", "<|stop|>")
ADDED = "<tool_call>"


def byte_level() -> Tokenizer:
    """All bytes, some pairs, an added token and two special ones."""
    single = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("{", '"'), ('"', ":"), ("a", "b"), ("t", "r"), ("o", "n"), ("on", "e")]
    tokens = [*single, *("".join(pair) for pair in merges)]
    model = BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(ADDED, special=False, normalized=False)])
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As sentencepiece's: spaces as U+2581, and a token per byte for what has none of its own."""
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789{}[]:,.\"'-", "▁"]
    merges = [("▁", "a"), ("a", "b"), ("{", '"')]
    tokens = [
        *("<unk>", "<s>", "</s>"),
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *letters,
        *("".join(pair) for pair in merges),
    ]
    model = BPE(
        vocab={token: at for at, token in enumerate(tokens)},
        merges=merges,
        byte_fallback=True,
        unk_token="<unk>",
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer
