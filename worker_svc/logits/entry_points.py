"""Logits processors that other packages bring, found by the names of their entry points."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Final

import structlog

from worker_svc.errors import WrongSettingError
from worker_svc.logits.built_in import ProcessorFactory

log = structlog.get_logger()

GROUP: Final = "quire.logits_processors"
_SETTING: Final = "--logits-processors"


def load_processors(setting: str | None) -> Mapping[str, ProcessorFactory]:
    """Import the processors of the setting `a,b`, in this order, by name. WrongSettingError if one
    is not installed, cannot be imported, or is named twice."""
    installed = {point.name: point for point in entry_points(group=GROUP)}
    found: dict[str, ProcessorFactory] = {}
    for name in filter(None, (part.strip() for part in (setting or "").split(","))):
        if name in found:
            raise WrongSettingError(f"{_SETTING}: {name} is named twice")
        if name not in installed:
            known = ", ".join(sorted(installed)) or "none"
            raise WrongSettingError(
                f"{_SETTING}: there is no logits processor {name}; installed (entry points of the "
                f"group {GROUP}): {known}"
            )
        try:
            found[name] = installed[name].load()
        except Exception as error:
            message = f"{_SETTING}: {name} ({installed[name].value}) cannot be imported: {error}"
            raise WrongSettingError(message) from error
        log.info("logits processor", name=name, implementation=installed[name].value)
    return found
