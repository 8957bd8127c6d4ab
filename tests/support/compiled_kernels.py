"""Compiles the launches of Triton kernels for a GPU that is not present, and describes the code.

For a process of its own without TRITON_INTERPRET: `python -m compiled_attention`,
`python -m compiled_fused`, `python -m compiled_linear` and `python -m compiled_sampling`.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

_H200 = GPUTarget("cuda", 90, 32)
_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


@dataclass(frozen=True)
class Compiled:
    """What a launch became."""

    kernel: str
    registers: int  # of a thread
    spilled_bytes: int
    shared_bytes: int
    ptx: str

    def count(self, instruction: str) -> int:
        """How often the pattern stands in the code."""
        return len(re.findall(instruction, self.ptx))


class Recorder:
    """Stands in for a kernel: compiles instead of launching."""

    def __init__(self, kernel: Any, compiled: list[Compiled]) -> None:
        self._kernel = kernel
        self._compiled = compiled

    def __getitem__(self, grid: object) -> Any:
        return self._compile

    def _compile(
        self,
        *args: Any,
        num_warps: int = 4,
        num_stages: int = 3,
        enable_fp_fusion: bool = True,
        **named: Any,
    ) -> None:
        values = dict(zip(self._kernel.arg_names, args, strict=False)) | named
        signature: dict[str, str] = {}
        constants: dict[tuple[int, ...], Any] = {}
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        for index, parameter in enumerate(self._kernel.params):
            value = values[parameter.name]
            fixed = parameter.is_constexpr or value is None
            if fixed or (type(value) is int and value == 1 and not parameter.do_not_specialize):
                signature[parameter.name] = "constexpr"
                constants[(index,)] = value
                continue
            signature[parameter.name] = _type_of(value)
            if _is_multiple_of_16(value) and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(self._kernel, signature, constants, attributes)
        options = {
            "num_warps": num_warps,
            "num_stages": num_stages,
            "enable_fp_fusion": enable_fp_fusion,
        }
        made = triton.compile(source, target=_H200, options=options)
        ptx = made.asm["ptx"]
        used = _assemble(ptx)
        self._compiled.append(
            Compiled(
                kernel=self._kernel.__name__,
                registers=int(_found(r"Used (\d+) registers", used)),
                spilled_bytes=sum(map(int, re.findall(r"(\d+) bytes spill", used))),
                shared_bytes=made.metadata.shared,
                ptx=ptx,
            )
        )


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _is_multiple_of_16(value: Any) -> bool:
    """Tensors begin at such addresses."""
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def _assemble(ptx: str) -> str:
    """The assembler's report on the code."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "kernel.ptx"
        source.write_text(ptx)
        done = subprocess.run(
            [get_ptxas(90).path, "-v", "--gpu-name", "sm_90a", source, "-o", f"{directory}/kernel"],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stderr


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, text
    return match[1]
