"""The worker's settings."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from quire.service.addresses import Address
from quire.service.settings import ServiceSettings
from worker_svc.sizes import parse_size

_LAYERS = re.compile(r"[1-9]\d*(,[1-9]\d*)*")

Bytes = Annotated[int, BeforeValidator(parse_size)]


class WorkerSettings(ServiceSettings):
    """One model on one device, or on several ranks."""

    model_config = SettingsConfigDict(env_prefix="QUIRE_WORKER_", cli_prog_name="quire-worker")

    listen: Address = Field(
        "127.0.0.1:50053", description="host:port (port 0: a free one) or unix:/path."
    )
    engine: Literal["torch", "sim"] = Field(
        "torch", description="What runs the plans: the model, or a simulation without one."
    )
    model: str | None = Field(
        None, description="Model folder in Hugging Face format, or a hub id; optional with sim."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub model.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of the weights; auto: that of the checkpoint."
    )
    quantization: Literal["int8", "int4"] | None = Field(
        None,
        description="Rounds the weights of linear layers to 8 or 4 bits when the model is loaded; "
        "for checkpoints of 16 or 32 bits.",
    )
    int8_activations: bool = Field(
        False,
        description="Rounds the inputs of products to 8 bits, one scale per token, also where a "
        "quantised checkpoint has 16 (GPTQ, AWQ, GGUF, W8A16, W4A16): faster, and less exact; on a "
        "GPU for symmetric weights of 8 bits with one scale per output.",
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = Field(
        "auto",
        description="Type of cached keys and values; auto: that of the model; fp8: 8 bits, with "
        "scales from the checkpoint or from a run over random tokens.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model runs; auto: a GPU if there is one."
    )
    kernels: Literal[
        "auto",
        "cpp",
        "reference",
        "torch",
        "triton",
        "cpp-portable",
        "cpp-avx2",
        "cpp-avx512",
        "cpp-avx512-vnni",
        "cpp-avx512-bf16",
        "cpp-amx",
    ] = Field(
        "auto",
        description="Implementation of attention, sampling and the like; auto: the fastest.",
    )
    attention: Literal["auto", "paged", "flash-attn", "torch-varlen"] = Field(
        "auto",
        description="Attention on a GPU; auto: FlashAttention where it is possible (blocks of a "
        "multiple of 256 tokens, 16 bits) and `--kernels` is auto; paged: the one of `--kernels`.",
    )
    logits_processors: str | None = Field(
        None,
        description="Logits processors of installed packages, by the names of their entry points, "
        "separated by commas; they change logits in this order.",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=1024,
        description="Ranks, processes that share each layer of the model; the worker starts those "
        "that torchrun has not; on GPUs each has one.",
    )
    pipeline_parallel_size: int = Field(
        1,
        ge=1,
        le=1024,
        description="Stages of consecutive layers, each on a rank of its own, or on as many as "
        "`--tensor-parallel-size`; on a CPU only.",
    )
    pipeline_layers: str | None = Field(
        None,
        description="Number of layers of each stage, separated by commas, such as 10,12,10; if "
        "absent, stages have about equal weights, those of the head included.",
    )
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="CPU threads of the model, which the ranks of a host share; 0: as many as "
        "cores.",
    )
    block_size: int = Field(16, ge=1, le=2**16, description="Tokens per block of the cache.")
    max_num_seqs: int = Field(64, ge=1, description="Sequences that run at once.")
    max_model_len: int | None = Field(
        None,
        ge=2,
        description=(
            "Longest sequence in tokens; if absent, the model's own limit, or the short range of "
            "its rotary embeddings (longrope)."
        ),
    )
    max_num_batched_tokens: int = Field(
        2048,
        ge=1,
        le=2**20,
        validate_default=True,
        description="Most tokens in one step; at least --max-num-seqs.",
    )
    num_speculative_tokens: int = Field(
        0,
        ge=0,
        le=16,
        description="Most draft tokens of a sequence in a step (speculative decoding); 0: none; on "
        "a CPU only.",
    )
    speculative_model: str | None = Field(
        None,
        description="Draft model that proposes them, a smaller one with the same vocabulary: a "
        "folder or a hub id; without one they are proposed by prompt lookup.",
    )
    kv_cache_memory: Bytes | None = Field(
        None,
        gt=0,
        description="Memory of the key-value cache, such as 256MiB or 4GiB; 1GiB on a CPU if "
        "absent, on a GPU what `--gpu-memory-utilization` leaves.",
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="Share of a GPU's memory for this worker's weights, steps and cache.",
    )
    gpu_locks: Path | None = Field(
        None,
        description="Folder of the lock files by which workers of one GPU load one at a time; "
        "containers have to share it; the system's temporary folder if absent.",
    )
    num_blocks: int | None = Field(
        None,
        ge=2,
        description="Blocks of the cache, the null block included; overrides the memory.",
    )
    swap_space: Bytes = Field(
        0,
        ge=0,
        description="Host memory for blocks of swapped-out sequences, such as 4GiB; 0: none.",
    )
    weight_cache: Path | None = Field(
        None,
        description="Folder in which a worker on a CPU keeps packed weights, which its next "
        "start maps; `$XDG_CACHE_HOME/quire/weights`, or `~/.cache/quire/weights`, if absent.",
    )
    weight_cache_size: Bytes = Field(
        20 * 10**9,
        ge=0,
        validate_default=True,
        description="Most bytes in --weight-cache, such as 20GB; those used longest ago are "
        "removed; 0: weights are not cached.",
    )
    weight_cache_shared: bool = Field(
        False,
        description="Leaves cached weights mapped, so that workers of one machine share their "
        "memory, instead of copying them into huge pages, which are read faster.",
    )
    record: Path | None = Field(
        None, description="File that receives every plan and result, for `quire replay`."
    )
    progress_file: Path | None = Field(
        None, description="File that receives what the worker does while it loads the model."
    )
    enforce_eager: bool = Field(False, description="On a GPU: runs every step without CUDA graphs.")
    enable_torch_compile: bool = Field(
        False,
        description="Compiles the model by torch.compile, which needs a compiler and about a "
        "minute; not with kernels in C++, which replace what it would compile.",
    )
    sim_vocab_size: int | None = Field(
        None, ge=1, description="sim: tokens of the vocabulary; the model's, or 32000, if absent."
    )
    sim_tokens: Path | None = Field(
        None, description="sim: a recording whose sampled tokens are sampled again, step by step."
    )
    sim_num_host_blocks: int = Field(0, ge=0, description="sim: host blocks for swapping.")
    sim_step_ms: float = Field(
        6.0,
        ge=0,
        allow_inf_nan=False,
        description="sim: milliseconds that every forward pass takes.",
    )
    sim_token_us: float = Field(
        30.0,
        ge=0,
        allow_inf_nan=False,
        description="sim: microseconds more for each scheduled token.",
    )
    sim_context_ns: float = Field(
        25.0,
        ge=0,
        allow_inf_nan=False,
        description="sim: nanoseconds more for each token attended to.",
    )
    sim_longest_jump: int = Field(
        0,
        ge=0,
        description="sim: tokens that a row with look-ahead may gain in addition to a sampled one.",
    )
    sim_acceptance_rate: float = Field(
        0.7,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="sim: share of drafts that are right, with `--num-speculative-tokens`.",
    )
    sim_poison_token_id: int | None = Field(
        None, ge=0, description="sim: a prompt with this token kills the worker; for tests."
    )

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def layers_of_stages(self) -> tuple[int, ...] | None:
        """None: as the model suggests."""
        given = self.pipeline_layers
        return None if given is None else tuple(map(int, given.split(",")))

    @field_validator("pipeline_layers")
    @classmethod
    def _has_layers_of_each_stage(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        if _LAYERS.fullmatch(value) is None:
            raise ValueError("must be the number of layers of each stage, such as 10,12,10")
        num_stages = info.data.get("pipeline_parallel_size")
        if num_stages is not None and (found := value.count(",") + 1) != num_stages:
            raise ValueError(
                f"must have a number for each stage: has {found}, and --pipeline-parallel-size is "
                f"{num_stages}"
            )
        return value

    @field_validator("max_num_batched_tokens")
    @classmethod
    def _covers_all_rows(cls, value: int, info: ValidationInfo) -> int:
        max_num_seqs = info.data.get("max_num_seqs")
        if max_num_seqs is not None and max_num_seqs > value:
            raise ValueError(
                f"must be at least max_num_seqs, which is {max_num_seqs}: each running sequence "
                "takes a token of a step"
            )
        return value
