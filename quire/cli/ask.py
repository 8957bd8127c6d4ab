"""Commands that ask a running server: generate, tokenize, models."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer

from quire.cli.app import ModelName, Patience, Targets, Timeout, integer, number, one_line_errors
from quire.cli.patient_client import patient_client
from quire.cli.turns import Turns
from quire.patience import RESUME_TIMEOUT_S
from quire.prompts import Prompt
from quire.requests import RequestOptions
from quire.sampling import SamplingParams
from quire.targets import DEFAULT_TARGET


@one_line_errors()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    target: Targets = DEFAULT_TARGET,
    model: ModelName = None,
    temperature: Annotated[
        float | None, typer.Option(parser=number, help="0 takes the most likely token.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(parser=number, help="Probability mass considered.")
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(parser=number, help="Share of the best token's likelihood considered."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(parser=integer, help="Tokens considered; 0: all.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(parser=integer, help="Most tokens to write.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(parser=integer, help="Equal seeds give equal texts.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="A text that ends the output; may be repeated.")
    ] = None,
    n: Annotated[
        int | None, typer.Option("--n", parser=integer, help="Texts to write, 1 to 16.")
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option(
            parser=integer, help="Smaller is served earlier, where the policy is priority."
        ),
    ] = None,
    stream: Annotated[bool, typer.Option(help="Print the text as it is written.")] = True,
    chat: Annotated[bool, typer.Option("--chat", help="Send it as a user's message.")] = False,
    timeout: Timeout = None,
    resume_timeout: Patience = RESUME_TIMEOUT_S,
) -> None:
    """Prints the continuation of a prompt; several one after the other."""
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        top_k=top_k,
        max_tokens=max_tokens,
        seed=seed,
        stop=stop,
        n=n,
    )
    asked: Prompt = [{"role": "user", "content": prompt}] if chat else prompt
    options: RequestOptions = {"model": model, "priority": priority}
    turns = Turns(n or 1, partial(typer.echo, nl=False))
    with patient_client(target, resume_timeout) as client:
        if stream:
            for message in client.stream_generate(asked, params, timeout_s=timeout, **options):
                for delta in message.outputs:
                    turns.add(delta)
        else:
            for output in client.generate(asked, params, timeout_s=timeout, **options).outputs:
                turns.add(output)


@one_line_errors()
def tokenize(
    text: Annotated[str, typer.Argument(help="The text to tokenize.")],
    target: Targets = DEFAULT_TARGET,
    model: ModelName = None,
    special_tokens: Annotated[
        bool, typer.Option(help="Add the tokens that the model's tokenizer puts around a text.")
    ] = True,
    timeout: Timeout = None,
    resume_timeout: Patience = RESUME_TIMEOUT_S,
) -> None:
    """Prints the token ids of a text."""
    with patient_client(target, resume_timeout) as client:
        token_ids = client.tokenize(
            text, add_special_tokens=special_tokens, model=model, timeout_s=timeout
        )
    typer.echo(" ".join(map(str, token_ids)))


@one_line_errors()
def models(
    target: Targets = DEFAULT_TARGET,
    timeout: Timeout = None,
    resume_timeout: Patience = RESUME_TIMEOUT_S,
) -> None:
    """Lists the models that are served."""
    with patient_client(target, resume_timeout) as client:
        served = client.list_models(timeout_s=timeout)
    rows = [("MODEL", "MAX_MODEL_LEN", "VOCAB_SIZE", "CHAT_TEMPLATE")]
    for model in served:
        chat = "yes" if model.has_chat_template else "no"
        rows.append((model.name, str(model.max_model_len), str(model.vocab_size), chat))
    typer.echo(_columns(rows))


def _columns(rows: Sequence[Sequence[str]]) -> str:
    """Columns that a person reads and `awk` splits."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
