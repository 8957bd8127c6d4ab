"""Commands that use a running server: generate, tokenize, models."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated

import typer

from quire.cli import sampling
from quire.cli.app import (
    ApiKey,
    ModelName,
    ResumeTimeout,
    Targets,
    Timeout,
    given_tls,
    integer_option,
    opened_stdin,
    report_errors,
)
from quire.cli.connection import connect
from quire.cli.json_output import AsJson, echo_json
from quire.cli.table import aligned
from quire.client.outputs import CompletionDelta, CompletionOutput, TokenLogprobs
from quire.client.prompts import Prompt
from quire.client.requests import RequestOptions
from quire.client.retry_policy import RESUME_TIMEOUT_S
from quire.client.sampling_params import SamplingParams
from quire.client.targets import DEFAULT_TARGET

_DEFAULTS = SamplingParams()
# Of commands that ask once, and have nothing to continue.
_QUESTION_TIMEOUT_S = 3.0


@report_errors()
@sampling.with_sampling_options
def generate(
    context: typer.Context,
    prompt: Annotated[
        str, typer.Argument(help="The text to continue; - reads it from standard input.")
    ],
    target: Targets = DEFAULT_TARGET,
    api_key: ApiKey = None,
    model: ModelName = None,
    params: SamplingParams = _DEFAULTS,
    n: Annotated[int | None, integer_option("Texts to generate, 1 to 16.", "--n")] = None,
    prompt_logprobs: Annotated[
        int | None,
        integer_option("Also print the prompt's log-probabilities, with so many alternatives."),
    ] = None,
    priority: sampling.Priority = None,
    stream: Annotated[bool, typer.Option(help="Print the text while it is generated.")] = True,
    chat: Annotated[bool, typer.Option("--chat", help="Send it as a user's message.")] = False,
    timeout: Timeout = None,
    resume_timeout: ResumeTimeout = RESUME_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Print the continuation of a prompt; several one after another."""
    text = standard_input() if prompt == "-" else prompt
    params = replace(params, n=n, prompt_logprobs=prompt_logprobs)
    content: Prompt = [{"role": "user", "content": text}] if chat else text
    options: RequestOptions = {"model": model, "priority": priority}
    printer = OrderedPrinter(n or 1)
    with connect(target, api_key, given_tls(context), resume_timeout) as client:
        if stream and not as_json:
            for message in client.stream_generate(content, params, timeout_s=timeout, **options):
                _print_prompt(message.prompt_logprobs)
                for delta in message.outputs:
                    printer.add(delta)
        else:
            whole = client.generate(content, params, timeout_s=timeout, **options)
            if as_json:
                echo_json(asdict(whole))
                return
            _print_prompt(whole.prompt_logprobs)
            for output in whole.outputs:
                printer.add(output)


@report_errors()
def tokenize(
    context: typer.Context,
    text: Annotated[str, typer.Argument(help="The text to tokenize.")],
    target: Targets = DEFAULT_TARGET,
    api_key: ApiKey = None,
    model: ModelName = None,
    special_tokens: Annotated[
        bool, typer.Option(help="Add the special tokens that the model's tokenizer adds.")
    ] = True,
    timeout: Timeout = None,
    resume_timeout: ResumeTimeout = _QUESTION_TIMEOUT_S,
) -> None:
    """Print the token ids of a text."""
    with connect(target, api_key, given_tls(context), resume_timeout) as client:
        token_ids = client.tokenize(
            text, add_special_tokens=special_tokens, model=model, timeout_s=timeout
        )
    typer.echo(" ".join(map(str, token_ids)))


@report_errors()
def models(
    context: typer.Context,
    target: Targets = DEFAULT_TARGET,
    api_key: ApiKey = None,
    timeout: Timeout = None,
    resume_timeout: ResumeTimeout = _QUESTION_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """List the served models."""
    with connect(target, api_key, given_tls(context), resume_timeout) as client:
        served = client.list_models(timeout_s=timeout)
    if as_json:
        echo_json({"models": [asdict(model) for model in served]})
        return
    rows = [("MODEL", "MAX_MODEL_LEN", "VOCAB_SIZE", "CHAT_TEMPLATE")]
    for model in served:
        chat = "yes" if model.has_chat_template else "no"
        rows.append((model.name, str(model.max_model_len), str(model.vocab_size), chat))
    typer.echo("\n".join(aligned(rows, left=range(len(rows[0])))))


class OrderedPrinter:
    """Prints concurrent completions one after another, each of several with a heading.

    The first completion is printed while it is generated. Parts of later ones are held back.
    """

    def __init__(self, num_completions: int) -> None:
        self._num_completions = num_completions
        # The index of the completion being printed, and whether a part of it has been printed.
        self._index = 0
        self._has_begun = False
        self._held_back: dict[int, list[CompletionDelta | CompletionOutput]] = {}

    def add(self, part: CompletionDelta | CompletionOutput) -> None:
        self._held_back.setdefault(part.index, []).append(part)
        while parts := self._held_back.pop(self._index, None):
            for held_back in parts:
                self._print_part(held_back)

    def _print_part(self, part: CompletionDelta | CompletionOutput) -> None:
        write = partial(typer.echo, nl=False)
        if not self._has_begun and self._num_completions > 1:
            separator = "\n" if self._index else ""
            write(f"{separator}[{self._index + 1}/{self._num_completions}]\n")
        self._has_begun = part.finish_reason is None
        write(part.text)
        if part.finish_reason is not None:
            write("\n")
            self._index += 1


def _print_prompt(logprobs: Sequence[TokenLogprobs | None] | None) -> None:
    """Print a table of the prompt's tokens after the first, which has no log-probability."""
    if logprobs is None:
        return
    rows = [("PROMPT", "LOGPROB", "RANK", "MOST_LIKELY")]
    for entries in logprobs:
        if entries is None:
            continue
        token, *_ = entries.values()
        top = sorted(entries.values(), key=lambda entry: entry.rank)
        likely = [f"{one.decoded_token!r} {one.logprob:.3f}" for one in top if one is not token]
        shown = (f"{token.logprob:.3f}", str(token.rank), ", ".join(likely))
        rows.append((repr(token.decoded_token), *shown))
    typer.echo("\n".join([*aligned(rows, left=(0, 3)), ""]))


def standard_input() -> str:
    """The prompt on standard input, without the line's end. ValueError without one."""
    text = opened_stdin().read().removesuffix("\n")
    if not text:
        raise ValueError("standard input has no prompt")
    return text
