"""Numbers of bytes as text with units."""

import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", re.IGNORECASE)
_FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DECIMAL_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_MOST_BYTES = 2**63


def parse_size(value: object) -> object:
    """Bytes of a size such as `256MiB`, `1.5GB` or `1048576`. ValueError for anything else."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError("a size looks like 256MiB, 1.5GB or 1048576")
    number, unit = match[1], (match[2] or "B").upper()
    factors = _FACTORS if "I" in unit else _DECIMAL_FACTORS
    size = float(number) * factors[unit.rstrip("B").rstrip("I")]
    if size > _MOST_BYTES:
        raise ValueError("no machine has as many bytes")
    return int(size)


def size_text(num_bytes: int) -> str:
    """Bytes in readable units: `512 B`, `1.5 MiB`, `139.8 GiB`."""
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.1f}".removesuffix(".0") + f" {units[0]}"
