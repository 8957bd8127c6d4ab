"""Options of commands that sample: `generate`, `chat`."""

from typing import Annotated

import typer

from quire.cli.app import integer_option, number_option

Temperature = Annotated[float | None, number_option("0 takes the most likely token.")]
TopP = Annotated[float | None, number_option("Probability mass considered.")]
MinP = Annotated[
    float | None, number_option("Least probability considered, as a share of the highest.")
]
TopK = Annotated[int | None, integer_option("Tokens considered; 0: all.")]
MaxTokens = Annotated[int | None, integer_option("Most tokens to generate.")]
Seed = Annotated[int | None, integer_option("Equal seeds give equal texts.")]
Stop = Annotated[
    list[str] | None, typer.Option(help="A text that ends the output; may be repeated.")
]
Priority = Annotated[
    int | None, integer_option("Lower values are scheduled first, under the priority policy.")
]
System = Annotated[str | None, typer.Option(help="The system message.")]
