"""Adds a flag per setting of each service to a command: `--gateway.max-live-calls 5`."""

import functools
import inspect
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Final

import typer

from quire.launcher.service_settings import ServiceSetting

# The parameter that receives the given settings, by environment variable.
PARAMETER: Final = "settings"
# Between service and setting, in names of parameters. Own parameters do not have it.
_SEPARATOR: Final = "__"
_PANEL: Final = "Frequent settings"
# Settings that also have a flag without the service's name.
_FREQUENT: Final = {
    ("gateway", "api_keys"),
    *(
        ("worker", name)
        for name in (
            *("engine", "dtype", "quantization", "device", "block_size", "kv_cache_memory"),
            *("max_model_len", "max_num_seqs"),
        )
    ),
}


def with_service_flags(
    command: Callable[..., None], settings: Iterable[ServiceSetting]
) -> Callable[..., None]:
    """The command with a flag per setting. It gets those that are given in its parameter
    `settings`; flags of reserved settings are refused with the reason."""
    flags: dict[str, tuple[str, ServiceSetting]] = {}
    for setting in settings:
        flags[f"{setting.service}{_SEPARATOR}{setting.name}"] = (setting.flag, setting)
        if (setting.service, setting.name) in _FREQUENT:
            flags[setting.name] = (f"--{setting.name.replace('_', '-')}", setting)
    own = inspect.signature(command).parameters
    parameters = [
        *(parameter for name, parameter in own.items() if name != PARAMETER),
        *(_parameter(name, flag, setting) for name, (flag, setting) in flags.items()),
    ]

    @functools.wraps(command)
    def wrapper(**arguments: Any) -> None:
        given = {}
        for name, (flag, setting) in flags.items():
            if (value := arguments.pop(name)) is None:
                continue
            if setting.variable in given:
                raise typer.BadParameter(f"{flag} and {setting.flag} are the same setting")
            given[setting.variable] = str(value).lower() if setting.is_flag else value
        command(**arguments, **{PARAMETER: given})

    # typer reads a command's options from both.
    vars(wrapper).update(
        __signature__=inspect.Signature(parameters),
        __annotations__={parameter.name: parameter.annotation for parameter in parameters},
    )
    return wrapper


def is_service_flag(parameter_name: str | None) -> bool:
    """Whether an option has the name of a service."""
    return _SEPARATOR in (parameter_name or "")


def settings_help(settings: Sequence[ServiceSetting]) -> Iterator[str]:
    """Lines that describe the flags of all settings, by service."""
    width = shutil.get_terminal_size().columns
    service = None
    for setting in settings:
        if setting.reserved is not None:
            continue
        if setting.service != service:
            service = setting.service
            yield f"\nSettings of {'each worker' if service == 'worker' else f'the {service}'}:"
        form = f" / {setting.off_flag}" if setting.is_flag else f" {setting.form}"
        default = f"  (default: {setting.default})" if setting.default is not None else ""
        yield f"  {setting.flag}{form}{default}"
        yield textwrap.indent(textwrap.fill(setting.field.description or "", width - 6), 6 * " ")


def _parameter(name: str, flag: str, setting: ServiceSetting) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=_option(flag, setting))


def _option(flag: str, setting: ServiceSetting) -> Any:
    if setting.reserved is not None:
        refuse = _refusal(setting.reserved)
        return Annotated[str | None, typer.Option(flag, parser=refuse, hidden=True)]
    text, panel = setting.field.description, _PANEL
    if setting.is_flag:
        declaration = f"{flag}/{setting.off_flag}"
        return Annotated[bool | None, typer.Option(declaration, help=text, rich_help_panel=panel)]
    return Annotated[
        str | None,
        typer.Option(
            flag, parser=_parser(setting), metavar=setting.form, help=text, rich_help_panel=panel
        ),
    ]


def _refusal(reason: str) -> Callable[[str], str]:
    def refuse(_: str) -> str:
        raise typer.BadParameter(f"serve sets it; {reason}")

    return refuse


def _parser(setting: ServiceSetting) -> Callable[[str], str]:
    def parse(text: str) -> str:
        try:
            return setting.check(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return parse
