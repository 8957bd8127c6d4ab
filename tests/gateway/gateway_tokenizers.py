"""Small real tokenizers, trained or defined in memory."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog. ",
    "Größe, naïve façade, Ελληνικά, 日本語, 한국어, 🙂👩‍👩‍👧 and more. ",
    "def main() -> None:\n    print('hello')\n",
]
EOS = "</s>"
BOS = "<s>"


def byte_level(vocab_size: int = 400) -> Tokenizer:
    """As GPT-2's and Llama 3's: tokens are byte strings, not always whole characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[BOS, EOS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2's: words begin with U+2581, characters without a token become byte tokens."""
    pieces = ["<unk>", BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "c", "d", "e", "é", "日", "!", "\N{REPLACEMENT CHARACTER}"]
    merges = [("▁", "a"), ("▁a", "b"), ("c", "d"), ("▁", "▁")]
    pieces += ["".join(merge) for merge in merges]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: id_ for id_, piece in enumerate(pieces)},
            merges=merges,
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", BOS, EOS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """The same vocabulary with the decoder of older SentencePiece conversions."""
    tokenizer = byte_fallback()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT's: tokens that continue a word begin with a mark."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[UNK]"], show_progress=False
    )
    tokenizer.train_from_iterator([text.lower() for text in TEXT] * 4, trainer)
    return tokenizer
