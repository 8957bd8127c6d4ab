"""Commands for API keys."""

import re
from typing import Annotated

import typer

from quire.cli.app import report_errors
from quire.service.api_keys import TENANT_NAME, hash_key, new_key

keys = typer.Typer(name="keys", no_args_is_help=True, help="Make API keys.")


@keys.callback()
def options() -> None:
    """Make API keys."""


@keys.command()
@report_errors()
def new(tenant: Annotated[str, typer.Argument(help="The tenant's name in the keys file.")]) -> None:
    """Print a new key, which is not shown again, and the entry for the gateway's keys file."""
    if not re.fullmatch(TENANT_NAME, tenant):
        raise typer.BadParameter(
            f"{tenant!r} is no tenant's name: letters, digits, '.', '_' and '-', 64 at most"
        )
    # YAML reads a name such as `true` or `5` as something else.
    key = new_key()
    typer.echo(f"key: {key}\n")
    typer.echo("Add its hash to the file of --api-keys, to the tenant's keys or as a new tenant:\n")
    typer.echo(f'- name: "{tenant}"\n  keys: [{hash_key(key).hex()}]')
