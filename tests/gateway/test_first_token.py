"""Formats that cannot begin because of other parameters are refused before they reach a worker."""

import asyncio
from contextlib import nullcontext
from typing import Any

import grpc
import pytest
from gateway_stack import Stack, field_of, info_of
from grammar_tokenizers import SPECIAL, byte_level

from gateway_svc.generation.first_token import check_first_token
from gateway_svc.structured.compiler import StructuredOutputCompiler
from quire.internal.v1.logits_pb2 import Grammar, LogitsParams
from quire.service.errors import RequestError
from quire.v1 import inference_pb2
from quire.v1 import structured_output_pb2 as pb

TOKENIZER = byte_level()
COMPILER = StructuredOutputCompiler(TOKENIZER, TOKENIZER.get_vocab_size())
EOS = [TOKENIZER.token_to_id(text) for text in SPECIAL]


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def words(*texts: str) -> dict[str, list[int]]:
    found = [ids(text) for text in texts]
    return {
        "bad_words_token_ids": [token for word in found for token in word],
        "bad_words_lengths": [len(word) for word in found],
    }


ALLOWED = "sampling_params.allowed_token_ids.ids"
BAD_WORDS = "sampling_params.bad_words"
STOPS = "sampling_params.stop_token_ids"
THINKING = {"begins_after_token_ids": ids("</think>")}
NUMBER, LETTERS, EMPTY = "[0-9]+", "x|y", "x*"
CASES: list[tuple[str, dict[str, Any], str | None]] = [
    (NUMBER, {"allowed_token_ids": ids("ab")}, ALLOWED),
    # The rest of the output is for the worker.
    (NUMBER, {"allowed_token_ids": ids("a1")}, None),
    (NUMBER, {"allowed_token_ids": ids("1"), **words("1")}, ALLOWED),
    (NUMBER, {"allowed_token_ids": ids("1"), **words("12", "2")}, None),
    (NUMBER, {"allowed_token_ids": EOS}, ALLOWED),
    (NUMBER, {"allowed_token_ids": ids("1"), "stop_token_ids": [*EOS, *ids("1")]}, ALLOWED),
    (NUMBER, {"allowed_token_ids": [10**6]}, ALLOWED),
    (LETTERS, words("x", "y"), BAD_WORDS),
    (LETTERS, words("x", "yz"), None),
    (LETTERS, {"stop_token_ids": [*EOS, *ids("xy")]}, STOPS),
    (LETTERS, {"stop_token_ids": [*EOS, *ids("x")], **words("y")}, BAD_WORDS),
    (LETTERS, {"stop_token_ids": [*EOS, *ids("x")]}, None),
    # An empty output needs no token but a stop token.
    (EMPTY, words("x"), None),
    (EMPTY, {"allowed_token_ids": EOS[:1]}, None),
    (EMPTY, {"allowed_token_ids": ids("a")}, ALLOWED),
    # Where one text alone can follow, its first token is decided.
    ("xyz", {"allowed_token_ids": ids("yz")}, ALLOWED),
    ("xyz", words("x"), BAD_WORDS),
    # Before the format begins, other tokens are possible.
    (NUMBER, {"allowed_token_ids": ids("ab"), "grammar": THINKING}, None),
    # What ends the reasoning must be possible, unless the output may end within it.
    (NUMBER, {"stop_token_ids": [*EOS, *ids("k")], "grammar": THINKING}, STOPS),
    (EMPTY, {"stop_token_ids": [*EOS, *ids("k")], "grammar": THINKING}, None),
]


@pytest.mark.parametrize(("regex", "changes", "field"), CASES, ids=str)
def test_the_field_that_excludes_every_first_token_is_named(
    regex: str, changes: dict[str, Any], field: str | None
) -> None:
    compiled = asyncio.run(COMPILER.compile("f", pb.StructuredOutput(regex=regex)))
    message = LogitsParams(**{"stop_token_ids": EOS, "grammar": Grammar(), **changes})
    message_pattern = rf"^{field}: excludes (every|a) token .* can begin$"
    refused = pytest.raises(RequestError, match=message_pattern)
    with refused if field is not None else nullcontext():
        check_first_token(message, compiled.first_tokens, sets_stop_tokens=True)


def test_stop_tokens_that_the_request_does_not_set_are_not_named() -> None:
    output = pb.StructuredOutput(grammar="start: <|end|> /a/")
    compiled = asyncio.run(COMPILER.compile("f", output))
    message = LogitsParams(stop_token_ids=EOS, grammar=Grammar(field="f"))
    with pytest.raises(RequestError, match=r"^f: begins with a special token that ends the output"):
        check_first_token(message, compiled.first_tokens, sets_stop_tokens=False)


async def test_such_a_request_does_not_reach_the_scheduler(stack: Stack) -> None:
    params = inference_pb2.SamplingParams(
        structured_output=pb.StructuredOutput(regex=NUMBER),
        allowed_token_ids=inference_pb2.TokenIds(ids=stack.encode("fox")),
    )
    request = inference_pb2.GenerateRequest(text="The", sampling_params=params)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.inference.Generate(request)
    assert field_of(caught.value) == ALLOWED
    assert info_of(caught.value).reason == "NO_POSSIBLE_TOKEN"
    assert stack.scheduler.submissions.empty()
