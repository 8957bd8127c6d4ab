"""The group of all commands. It adds the flags of the services' settings to `serve` when that
command is used, because reading the settings delays the start."""

from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from quire.cli.serve.command import serve
from quire.cli.serve.service_flags import is_service_flag, with_service_flags
from quire.launcher.service_settings import service_settings

_SERVE: Final = "serve"


class CommandGroup(TyperGroup):
    """`serve` is first."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [_SERVE, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _serve_command() if cmd_name == _SERVE else super().get_command(ctx, cmd_name)

    def invoke(self, ctx: Any) -> Any:
        """Say where an option of all commands, such as `--tls-ca`, has to be."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            # Of an unknown option; its class is not public.
            option = getattr(error, "option_name", None)
            if not any(option in one.opts for one in self.params):
                raise
            example = f"{ctx.command_path} {option} … {ctx.invoked_subcommand} …"
            message = f"{option} is given before the command: {example}"
            raise typer.BadParameter(message, ctx) from error


class ServeCommand(TyperCommand):
    """Its help omits the flags of services, of which there are many; completion has them."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.params = [one for one in self.params if not is_service_flag(one.name)]
        super().format_help(ctx, formatter)


def _serve_command() -> Any:
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    try:
        single.command(_SERVE, cls=ServeCommand)(with_service_flags(serve, service_settings()))
    except ModuleNotFoundError:
        # `serve` reports the missing extras.
        anything = {"ignore_unknown_options": True, "allow_extra_args": True}
        single.command(_SERVE, context_settings=anything)(with_service_flags(serve, ()))
    return typer.main.get_command(single)
