"""Says which extra to install, before a child process dies of a missing import."""

import importlib.util
from collections.abc import Mapping

from quire.launcher.errors import LaunchError

# A package that each extra of the distribution brings, and no other one.
_NEEDS = {"gateway": "tokenizers", "scheduler": "redis", "worker": "torch"}


def check_installed(needs: Mapping[str, str] = _NEEDS) -> None:
    """LaunchError that names the extras whose packages cannot be found. Imports none of them."""
    missing = [extra for extra, package in needs.items() if not importlib.util.find_spec(package)]
    if missing:
        extras = "all" if len(missing) == len(needs) else ",".join(missing)
        raise LaunchError(
            f"a local stack needs {', '.join(needs[extra] for extra in missing)}: "
            f"pip install 'quire[{extras}]'"
        )
