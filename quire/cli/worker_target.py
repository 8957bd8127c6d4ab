"""The worker that a command speaks to: a given one, or a simulated one like the recorded one."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from quire.internal.v1 import worker_pb2
from quire.launcher.sim_worker import sim_worker
from quire.service.channels import INTERNAL_MESSAGE_BYTES, channel_options
from quire.targets import check_target

_SIM_VOCABULARY = re.compile(rb"sim vocab_size=(\d+) ")


@contextmanager
def worker_target(
    address: str | None, hello: worker_pb2.Hello, recording: Path | None = None
) -> Iterator[str]:
    """`address`, or that of a worker started for the context, with the geometry of `hello`, which
    samples the tokens of `recording` if the recorded worker was no simulated one."""
    if address is not None:
        check_target(address)
        yield address
        return
    with sim_worker(_flags(hello, recording)) as started:
        yield started


def worker_channel(target: str) -> grpc.Channel:
    return grpc.insecure_channel(target, options=channel_options(INTERNAL_MESSAGE_BYTES))


def _flags(hello: worker_pb2.Hello, recording: Path | None) -> dict[str, object]:
    flags: dict[str, object] = {
        "block-size": hello.block_size,
        "num-blocks": hello.num_blocks,
        "max-num-seqs": hello.max_num_seqs,
        "max-model-len": hello.max_model_len,
        "max-num-batched-tokens": hello.max_num_batched_tokens,
        "sim-num-host-blocks": hello.num_host_blocks,
        "sim-step-ms": 0,
        "sim-token-us": 0,
        "sim-context-ns": 0,
    }
    if simulated := _SIM_VOCABULARY.match(hello.model_fingerprint):
        flags["sim-vocab-size"] = int(simulated[1])
    elif recording is not None:
        flags["sim-tokens"] = recording
    return flags
