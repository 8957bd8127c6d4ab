"""Checks of the options of `bench`, before a server is contacted. Errors name the option."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from quire.client.arguments import UINT32_MAX, check_integer
from quire.service.addresses import is_http_url

STDOUT: Final = Path("-")
# Their prompts are drawn before the first is sent.
_MAX_PROMPTS: Final = 10_000_000


@contextmanager
def naming(flag: str) -> Iterator[None]:
    """Replace the field of a ValueError, `field: reason`, by the option that sets it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{flag}: {str(error).partition(': ')[2]}") from error


def check_counts(
    num_prompts: int,
    shared_prefix: int,
    max_concurrency: int | None,
    warmups: int,
    vocab_size: int | None,
) -> None:
    check_integer("--num-prompts", num_prompts, _MAX_PROMPTS, minimum=1)
    check_integer("--shared-prefix", shared_prefix, UINT32_MAX)
    check_integer("--max-concurrency", max_concurrency, UINT32_MAX, minimum=1)
    check_integer("--warmups", warmups, UINT32_MAX)
    check_integer("--vocab-size", vocab_size, UINT32_MAX, minimum=1)


def check_rates(request_rate: float, temperature: float) -> None:
    if not request_rate > 0:
        raise ValueError(f"--request-rate: must be above 0 (got {request_rate:g})")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"--temperature: must be 0 or more, and finite (got {temperature:g})")


def check_servers(openai: str | None, openai_model: str | None) -> None:
    if openai is not None and not is_http_url(openai):
        raise ValueError(f"--openai: expected http://host:port/v1 (got {openai!r})")
    if openai is None and openai_model is not None:
        raise ValueError("--openai-model: is the model of --openai, which is absent")


def check_file(path: Path | None) -> None:
    """The file that receives the results, which would be lost at the end."""
    if path is None or path == STDOUT:
        return
    if not path.parent.is_dir():
        raise ValueError(f"--json: there is no folder {path.parent}")
    if path.is_dir():
        raise ValueError(f"--json: {path} is a folder")
