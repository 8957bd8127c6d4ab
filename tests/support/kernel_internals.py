"""Pure functions of the C++ kernels that are no operations, compiled without torch."""

import subprocess
from collections.abc import Sequence
from ctypes import CDLL, c_double, c_int64
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.utils.cpp_extension import get_cxx_compiler

from kernels.cpu.library import SOURCE_FOLDER

_MOST_NUMBERS = 1 << 18


def attention_items(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    heads: tuple[int, int],
    head_dim: int,
    window: int,
    partition_keys: int,
    num_threads: int,
) -> list[int]:
    """The work items of a batch, as in `kernel_internals.cpp`."""
    starts = [sum(query_lens[:seq]) for seq in range(len(query_lens) + 1)]
    numbers = (*heads, head_dim, window, partition_keys, num_threads)
    return _numbers("attention_items", starts, seq_lens, len(seq_lens), *numbers)


def choose_packed_partition(num_keys: int, shares: float, num_threads: int) -> int:
    choose = _library().choose_packed_partition
    choose.restype = c_int64
    chosen: int = choose(c_int64(num_keys), c_double(shares), c_int64(num_threads))
    return chosen


def choose_streamed_partition(num_keys: int) -> int:
    choose = _library().choose_streamed_partition
    choose.restype = c_int64
    chosen: int = choose(c_int64(num_keys))
    return chosen


def prefetched(
    num_inputs: int,
    num_tiles: int,
    own: tuple[int, int],
    own_bytes: int,
    following: tuple[int, int],
    following_bytes: int,
    rows: int,
    row_bytes: int,
) -> list[int]:
    """The spans of a block's tiles, as in `kernel_internals.cpp`."""
    return _numbers(
        "prefetched",
        *(num_inputs, num_tiles, own, own_bytes, following, following_bytes, rows, row_bytes),
    )


def prefetched_ahead(num_steps: int, panel: int, panel_bytes: int, following: int) -> list[int]:
    """The spans of a tile that prefetches what it reads, as in `kernel_internals.cpp`."""
    return _numbers("prefetched_ahead", num_steps, panel, panel_bytes, following)


def _numbers(name: str, *arguments: int | Sequence[int]) -> list[int]:
    """The numbers that a function writes to its last argument."""
    out = (c_int64 * _MOST_NUMBERS)()
    given = [
        c_int64(argument) if isinstance(argument, int) else (c_int64 * len(argument))(*argument)
        for argument in arguments
    ]
    function = getattr(_library(), name)
    function.restype = c_int64
    return out[: function(*given, out)]


@cache
def _library() -> CDLL:
    sources = [Path(__file__).with_suffix(".cpp"), SOURCE_FOLDER / "attention" / "work_list.cpp"]
    with TemporaryDirectory() as folder:
        built = Path(folder) / "internals.so"
        options = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{SOURCE_FOLDER}", f"-o{built}"]
        subprocess.run([get_cxx_compiler(), *options, *map(str, sources)], check=True)
        return CDLL(str(built))
