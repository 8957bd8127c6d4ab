"""Prints requirements of pyproject.toml, one per line.

    python scripts/requirements.py EXTRA...      dependencies, including those of the extras
    python scripts/requirements.py build-system  requirements of a build

Images install these before the code is copied, so that a change of code does not install them
again.
"""

import sys
import tomllib
from pathlib import Path
from typing import Any


def requirements(pyproject: dict[str, Any], name: str) -> list[str]:
    """Return the requirements. KeyError if there is no such extra."""
    if name == "build-system":
        return list(pyproject["build-system"]["requires"])
    project = pyproject["project"]
    return [*project["dependencies"], *_extra(project, name)]


def _extra(project: dict[str, Any], name: str) -> list[str]:
    """Return the requirements of an extra, with those of the extras that it includes."""
    found = []
    for requirement in project["optional-dependencies"][name]:
        package, _, rest = requirement.partition("[")
        if package == project["name"]:
            for inner in rest.rstrip("]").split(","):
                found += _extra(project, inner)
        else:
            found.append(requirement)
    return found


if __name__ == "__main__":
    pyproject = tomllib.loads(Path("pyproject.toml").read_text())
    found = [line for name in sys.argv[1:] for line in requirements(pyproject, name)]
    print("\n".join(dict.fromkeys(found)))
