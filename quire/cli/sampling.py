"""Options of commands that sample: `generate`, `chat`."""

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from quire.cli.app import integer, integer_option, number, number_option
from quire.client.sampling_params import SamplingParams
from quire.client.structured_output import StructuredOutput

# The parameter of a command that receives what its options ask for.
PARAMETER: Final = "params"
_FORMATS: Final = "Structured output"

Priority = Annotated[
    int | None, integer_option("Lower values are scheduled first, under the priority policy.")
]
System = Annotated[str | None, typer.Option(help="The system message.")]


def _bias(value: str) -> tuple[int, float]:
    token_id, equals, bias = value.partition("=")
    if not equals:
        raise typer.BadParameter(f"{value!r} is not ID=VALUE")
    return integer(token_id), number(bias)


def _texts(help_text: str, flag: str, panel: str | None = None) -> Any:
    return typer.Option(flag, help=f"{help_text}; may be repeated.", rich_help_panel=panel)


def _format(help_text: str, flag: str) -> Any:
    return typer.Option(flag, help=help_text, rich_help_panel=_FORMATS)


# Of options that are not given.
_ABSENT: Final[tuple[object, ...]] = (None, [])

# By name, which is that of the field of SamplingParams.
_SAMPLING: Final[dict[str, Any]] = {
    "temperature": Annotated[float | None, number_option("0 takes the most likely token.")],
    "top_p": Annotated[float | None, number_option("Probability mass considered.")],
    "min_p": Annotated[
        float | None, number_option("Least probability considered, as a share of the highest.")
    ],
    "typical_p": Annotated[
        float | None, number_option("Probability mass of locally typical tokens considered.")
    ],
    "top_k": Annotated[int | None, integer_option("Tokens considered; 0: all.")],
    "max_tokens": Annotated[int | None, integer_option("Most tokens to generate.")],
    "min_tokens": Annotated[int | None, integer_option("Tokens before which nothing stops.")],
    "seed": Annotated[int | None, integer_option("Equal seeds give equal texts.")],
    "stop": Annotated[list[str] | None, _texts("A text that ends the output", "--stop")],
    "stop_token_ids": Annotated[
        list[int] | None,
        typer.Option(
            "--stop-token-id", parser=integer, help="A token that ends it; may be repeated."
        ),
    ],
    "ignore_eos": Annotated[
        bool | None, typer.Option("--ignore-eos", help="Continue past end-of-sequence tokens.")
    ],
    "presence_penalty": Annotated[
        float | None, number_option("For tokens that the output has, -2 to 2.")
    ],
    "frequency_penalty": Annotated[
        float | None, number_option("For each occurrence of a token in the output, -2 to 2.")
    ],
    "repetition_penalty": Annotated[
        float | None, number_option("Above 1: for tokens that prompt or output have.")
    ],
    "logit_bias": Annotated[
        list[Any] | None,
        typer.Option(
            parser=_bias,
            metavar="ID=VALUE",
            help="Added to a token's logit, -100 to 100; may be repeated.",
        ),
    ],
    "allowed_token_ids": Annotated[
        list[int] | None,
        typer.Option(
            "--allowed-token-id", parser=integer, help="A token that is possible; may be repeated."
        ),
    ],
    "bad_words": Annotated[
        list[str] | None, _texts("A text that the output must not have", "--bad-word")
    ],
    "truncate_prompt_tokens": Annotated[
        int | None, integer_option("Last tokens of the prompt that are used; -1: all that fit.")
    ],
    "speculation": Annotated[
        bool | None,
        typer.Option(
            "--speculation/--no-speculation", help="Whether a worker that drafts tokens does so."
        ),
    ],
}
# By name, which is that of the field of StructuredOutput.
_STRUCTURED: Final[dict[str, Any]] = {
    "json": Annotated[
        str | None, _format("The output follows a JSON Schema: a file or JSON.", "--json-schema")
    ],
    "json_object": Annotated[
        bool | None, _format("The output is any JSON object.", "--json-object")
    ],
    "regex": Annotated[str | None, _format("The output matches a regular expression.", "--regex")],
    "choice": Annotated[
        list[str] | None, _texts("A text that the output may be", "--choice", _FORMATS)
    ],
    "grammar": Annotated[
        str | None,
        _format(
            "The output follows a grammar in Lark's syntax or EBNF: a file or text.", "--grammar"
        ),
    ],
    "structural_tag": Annotated[
        str | None,
        _format("Tagged parts of the output follow schemas: a file or JSON.", "--structural-tag"),
    ],
}


def with_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option per sampling parameter, in the place of its parameter `params`,
    which gets them. ValueError for two formats at once."""
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name == PARAMETER:
            options = {**_SAMPLING, **_STRUCTURED}
            parameters += (_parameter(*option, parameter.kind) for option in options.items())
        else:
            parameters.append(parameter)

    @functools.wraps(command)
    def wrapper(**arguments: Any) -> None:
        sampling = {name: arguments.pop(name) for name in _SAMPLING}
        structured = {name: arguments.pop(name) for name in _STRUCTURED}
        command(**arguments, **{PARAMETER: _sampling_params(sampling, structured)})

    # typer reads a command's options from both.
    vars(wrapper).update(
        __signature__=inspect.Signature(parameters),
        __annotations__={parameter.name: parameter.annotation for parameter in parameters},
    )
    return wrapper


def _parameter(name: str, annotation: Any, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


def _sampling_params(sampling: dict[str, Any], structured: dict[str, Any]) -> SamplingParams:
    given = {name: value for name, value in sampling.items() if value not in _ABSENT}
    if "logit_bias" in given:
        given["logit_bias"] = _biases(given["logit_bias"])
    form = {name: value for name, value in structured.items() if value not in _ABSENT}
    if "grammar" in form:
        contents = _contents(form["grammar"])
        form["grammar"] = form["grammar"] if contents is None else contents
    for name, flag in (("json", "--json-schema"), ("structural_tag", "--structural-tag")):
        if name in form:
            form[name] = _json(flag, form[name])
    return SamplingParams(**given, structured_output=StructuredOutput(**form) if form else None)


def _biases(pairs: list[tuple[int, float]]) -> dict[int, float]:
    """ValueError for a token that has two biases."""
    biases: dict[int, float] = {}
    for token_id, bias in pairs:
        if token_id in biases:
            raise ValueError(f"logit_bias: the token {token_id} has two biases")
        biases[token_id] = bias
    return biases


def _json(flag: str, value: str) -> str:
    """The contents of a file of this name, or the value itself. ValueError if it is neither the
    name of a file nor JSON, as a mistyped name is."""
    contents = _contents(value)
    if contents is not None:
        return contents
    try:
        json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{flag}: {value!r:.100} is no file, and no JSON: {error}") from None
    return value


def _contents(value: str) -> str | None:
    """The contents of a file of this name; None if there is none."""
    try:
        is_file = Path(value).is_file()
    except (OSError, ValueError):
        # No name of a file can be this long, or has such characters.
        is_file = False
    return Path(value).read_text(encoding="utf-8") if is_file else None
