"""The failure of a row in which no token is possible."""

from collections.abc import Iterator, Sequence
from typing import Final

from worker_svc.plan.failures import InvalidField, RowFailure
from worker_svc.plan.logits_params import LogitsParams

REASON: Final = "NO_POSSIBLE_TOKEN"


def no_possible_token(params: LogitsParams, own: Sequence[str]) -> RowFailure:
    """`own` are the names of the worker's own processors that change the row. The field is the
    first of those that exclude tokens, as any of them may be the wrong one."""
    causes = list(_causes(params, own))
    if not causes:
        names = f" (logits processors {', '.join(own)})" if own else ""
        return RowFailure(f"no token is possible{names}")
    (name, _), *others = causes
    together = f" together with {' and '.join(text for _, text in others)}" if others else ""
    message = f"excludes{together} every token with which the output could go on"
    if params.grammar is not None and len(params.allowed_token_ids):
        message += "; a format needs its tokens, and a stop token at its end"
    return RowFailure(message, InvalidField(name, REASON))


def _causes(params: LogitsParams, own: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The fields that exclude tokens, and what they are called in a sentence."""
    if len(params.allowed_token_ids):
        yield "sampling_params.allowed_token_ids.ids", "allowed_token_ids"
    if params.bad_words:
        yield "sampling_params.bad_words", "bad_words"
    for name in own:
        if name in params.processor_args:
            yield processor_args_field(name), f"processor_args.{name}"
    if params.min_tokens:
        yield "sampling_params.min_tokens", "min_tokens"
    if params.grammar is not None:
        yield params.grammar.field, "the format of the output"


def processor_args_field(name: str) -> str:
    """The field with the arguments of a processor."""
    return f"sampling_params.processor_args.{name}"
