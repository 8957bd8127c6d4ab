"""Grammars of formats, and texts that follow them."""

import asyncio
import json
import random
from typing import Any

import numpy as np
from grammar_tokenizers import byte_level

from gateway_svc.structured.compiler import StructuredOutputCompiler
from quire.service.grammars import GrammarVocabulary
from quire.v1 import structured_output_pb2 as pb

TOKENIZER = byte_level()
SIZE = TOKENIZER.get_vocab_size()
VOCABULARY = GrammarVocabulary.from_tokenizer(TOKENIZER, SIZE)
FIELD = "sampling_params.structured_output"


def of_schema(schema: Any) -> pb.StructuredOutput:
    return pb.StructuredOutput(
        json_schema=schema if isinstance(schema, str) else json.dumps(schema)
    )


def definition_of(compiler: StructuredOutputCompiler, output: pb.StructuredOutput) -> str:
    return asyncio.run(compiler.compile(FIELD, output)).definition


def accepts(definition: str, text: str) -> bool:
    matcher = VOCABULARY.compile(definition)
    token_ids = TOKENIZER.encode(text).ids
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def random_text(definition: str, seed: int, max_tokens: int = 100) -> str | None:
    """A text that ends with probability 0.3 where it may; None if it does not within a limit."""
    generator, matcher, token_ids = random.Random(seed), VOCABULARY.compile(definition), list[int]()
    while len(token_ids) < max_tokens:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        possible = np.unpackbits(mask, bitorder="little")[: SIZE + 1].nonzero()[0].tolist()
        tokens = [token_id for token_id in possible if token_id != VOCABULARY.end_id]
        if len(tokens) < len(possible) and (not tokens or generator.random() < 0.3):
            return VOCABULARY.tokenizer.decode_bytes(token_ids).decode()
        token_ids.append(generator.choice(tokens))
        matcher.consume_token(token_ids[-1])
    return None
