"""Engines, types of weights, and what is compared: an engine with weights of one type."""

from collections.abc import Sequence
from dataclasses import dataclass

FLOAT32, BFLOAT16, INT8, INT4 = TYPES = ("float32", "bf16", "int8", "int4")
QUIRE, VLLM, LLAMA, LLAMA_SERVER, OPENVINO = ENGINES = (
    "quire",
    "vllm",
    "llama.cpp",
    "llama-server",
    "openvino",
)
TITLES = {
    FLOAT32: "float32",
    BFLOAT16: "bfloat16",
    INT8: "weights of 8 bits",
    INT4: "weights of 4 bits",
}
# llama.cpp's names of its formats.
GGUF = {BFLOAT16: "BF16", INT8: "Q8_0", INT4: "Q4_K_M"}
_VLLM = {BFLOAT16: "bf16", INT8: "W8A8", INT4: "W4A16"}


@dataclass(frozen=True)
class Variant:
    """An engine with weights of one type."""

    engine: str
    type: str

    @property
    def name(self) -> str:
        """For the command line, and for files."""
        return f"{self.engine}-{self.type}"

    @property
    def title(self) -> str:
        match self.engine:
            case "quire":
                return f"Quire {self.type}, through its gateway over gRPC"
            case "vllm":
                return f"vLLM {_VLLM[self.type]}, `LLM.generate`, eager"
            case "llama.cpp":
                return f"llama.cpp {GGUF[self.type]}, `llama-batched-bench`"
            case "llama-server":
                return f"llama.cpp {GGUF[self.type]}, `llama-server`"
            case _:
                return f"OpenVINO GenAI {self.type}"


VARIANTS = tuple(
    Variant(engine, kind)
    for kind in TYPES
    for engine in ENGINES
    # The comparison in float32 is that of the smaller models.
    if kind != FLOAT32 or engine == QUIRE
)


def chosen(names: Sequence[str]) -> list[Variant]:
    """Return the variants of the given engines, types or names; all without names. ValueError,
    with the name, if there is none."""
    for name in names:
        if not any(_matches(variant, name) for variant in VARIANTS):
            raise ValueError(f"no such system: {name}")
    return [v for v in VARIANTS if not names or any(_matches(v, name) for name in names)]


def _matches(variant: Variant, name: str) -> bool:
    return name in (variant.engine, variant.type, variant.name)
