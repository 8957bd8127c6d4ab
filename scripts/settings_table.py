"""Prints README's table of settings, made from the services' own settings classes.

python scripts/settings_table.py            the table
python scripts/settings_table.py --write    puts it into README.md
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from gateway_svc.settings import GatewaySettings
from quire.service.settings import ServiceSettings
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN = "<!-- settings: made by scripts/settings_table.py -->\n"
END = "<!-- end of settings -->\n"
_GIB = 2**30
SERVICES: tuple[type[ServiceSettings], ...] = (GatewaySettings, SchedulerSettings, WorkerSettings)


def settings_table() -> str:
    """A Markdown table, a line per setting; what all services share comes last."""
    lines = [
        "| service | flag | environment variable | default | meaning |",
        "|---|---|---|---|---|",
    ]
    for settings in SERVICES:
        own = {k: v for k, v in settings.model_fields.items() if k not in _shared_fields()}
        prefix = str(settings.model_config["env_prefix"])
        lines += _rows(prefix.split("_")[1].lower(), prefix, own)
    lines += _rows("each", "QUIRE_*_", _shared_fields())
    return "\n".join(lines) + "\n"


def with_table(readme: str) -> str:
    """`readme` with a fresh table between its two marks. ValueError if it lacks one of them."""
    before, _, rest = _partition(readme, BEGIN)
    _, _, after = _partition(rest, END)
    return f"{before}{BEGIN}{settings_table()}{END}{after}"


def _partition(text: str, mark: str) -> tuple[str, str, str]:
    if mark not in text:
        raise ValueError(f"no line {mark!r}")
    return text.partition(mark)


def _shared_fields() -> dict[str, FieldInfo]:
    return ServiceSettings.model_fields


def _rows(service: str, prefix: str, fields: dict[str, FieldInfo]) -> Iterator[str]:
    for name, field in fields.items():
        flag = f"`--{name.replace('_', '-')}`"
        meaning = (field.description or "").replace("|", "\\|")
        yield f"| {service} | {flag} | `{prefix}{name.upper()}` | {_default(field)} | {meaning} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, int) and default >= _GIB and default % _GIB == 0:
        return f"`{default // _GIB}GiB`"
    return "none" if default is None else f"`{default}`"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        README.write_text(with_table(README.read_text()))
    else:
        print(settings_table(), end="")
