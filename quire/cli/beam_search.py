"""The command `quire beam-search`."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Final, Literal

import typer

from quire.cli.app import (
    ApiKey,
    ModelName,
    ResumeTimeout,
    Targets,
    Timeout,
    given_tls,
    integer,
    integer_option,
    number_option,
    report_errors,
)
from quire.cli.connection import connect
from quire.cli.inference import standard_input
from quire.cli.json_output import AsJson, echo_json
from quire.cli.sampling import Priority
from quire.client.outputs import BeamSearchSequence
from quire.client.prompts import Prompt
from quire.client.retry_policy import RESUME_TIMEOUT_S
from quire.client.sampling_params import BeamSearchParams
from quire.client.targets import DEFAULT_TARGET

_EARLY_STOPPING: Final[Mapping[str | None, bool | Literal["never"] | None]] = {
    None: None,
    "false": False,
    "true": True,
    "never": "never",
}


def _early_stopping(value: str) -> str:
    """Check a value; the error message of typer's own choices is that of an exception."""
    if value not in _EARLY_STOPPING:
        raise typer.BadParameter(f"{value!r} is not false, true or never")
    return value


@report_errors()
def beam_search(
    context: typer.Context,
    prompt: Annotated[
        str, typer.Argument(help="The text to continue; - reads it from standard input.")
    ],
    target: Targets = DEFAULT_TARGET,
    api_key: ApiKey = None,
    model: ModelName = None,
    beam_width: Annotated[int | None, integer_option("Beams, 1 to 16; 4 by default.")] = None,
    max_tokens: Annotated[int | None, integer_option("Most tokens of a sequence.")] = None,
    length_penalty: Annotated[
        float | None, number_option("Above 0 prefers longer sequences; 1 by default.")
    ] = None,
    early_stopping: Annotated[
        str | None,
        typer.Option(
            parser=_early_stopping,
            metavar="<false|true|never>",
            help="When a search with enough ended sequences ends.",
        ),
    ] = None,
    stop_token_ids: Annotated[
        list[int] | None,
        typer.Option("--stop-token-id", parser=integer, help="A token that ends a sequence."),
    ] = None,
    ignore_eos: Annotated[
        bool | None, typer.Option("--ignore-eos", help="Continue past end-of-sequence tokens.")
    ] = None,
    priority: Priority = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send it as a user's message.")] = False,
    timeout: Timeout = None,
    resume_timeout: ResumeTimeout = RESUME_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Print the most likely continuations of a prompt, found by beam search."""
    text = standard_input() if prompt == "-" else prompt
    params = BeamSearchParams(
        beam_width=beam_width,
        max_tokens=max_tokens,
        length_penalty=length_penalty,
        early_stopping=_EARLY_STOPPING[early_stopping],
        stop_token_ids=stop_token_ids or None,
        ignore_eos=ignore_eos or None,
    )
    content: Prompt = [{"role": "user", "content": text}] if chat else text
    with connect(target, api_key, given_tls(context), resume_timeout) as client:
        found = client.beam_search(
            content, params, timeout_s=timeout, model=model, priority=priority
        )
    if as_json:
        echo_json(asdict(found))
        return
    for number, sequence in enumerate(found.sequences, 1):
        _print(number, len(found.sequences), sequence)


def _print(number: int, count: int, sequence: BeamSearchSequence) -> None:
    separator = "\n" if number > 1 else ""
    typer.echo(f"{separator}[{number}/{count}] score {sequence.score:.4f}")
    typer.echo(sequence.text)
