"""Options and texts of `--json`: one object per line, with stable keys."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, with stable keys.")]


def echo_json(value: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False))
