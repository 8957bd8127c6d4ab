"""Distributions of prompt and output lengths, parsed from the command line."""

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

FORMS = "N, N-N (uniform), normal:MEAN,DEVIATION or lognormal:MEDIAN,SIGMA"

_UNIFORM = re.compile(r"(\d+)(?:-(\d+))?")
_NUMBER = r"(\d+\.?\d*|\.\d+)"
_SHAPED = re.compile(rf"(normal|lognormal):{_NUMBER},{_NUMBER}")


@dataclass(frozen=True)
class Lengths:
    """A distribution of numbers of tokens."""

    # As on the command line.
    form: str
    _draw: Callable[[random.Random], float]

    def draw(self, rng: random.Random) -> int:
        """A number of tokens, at least 1."""
        return max(1, round(self._draw(rng)))

    def __str__(self) -> str:
        return self.form


def lengths(form: str) -> Lengths:
    """Parse one of the `FORMS`. ValueError, with the text, for others."""
    if (uniform := _UNIFORM.fullmatch(form)) is not None:
        low = int(uniform[1])
        return _uniform(form, low, low if uniform[2] is None else int(uniform[2]))
    if (shaped := _SHAPED.fullmatch(form)) is not None:
        return _shaped(form, shaped[1], float(shaped[2]), float(shaped[3]))
    raise ValueError(f"lengths: expected {FORMS} (got {form!r})")


def _uniform(form: str, low: int, high: int) -> Lengths:
    if not 1 <= low <= high:
        raise ValueError(f"lengths: must be at least 1, the smaller first (got {form!r})")
    return Lengths(form, lambda rng: rng.randint(low, high))


def _shaped(form: str, shape: str, middle: float, width: float) -> Lengths:
    if middle < 1:
        raise ValueError(f"lengths: must be at least 1 (got {form!r})")
    if shape == "normal":
        return Lengths(form, lambda rng: rng.gauss(middle, width))
    return Lengths(form, lambda rng: rng.lognormvariate(math.log(middle), width))
