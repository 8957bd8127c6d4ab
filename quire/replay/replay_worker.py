"""Connects commands to a worker at an address, or to a simulated one like the recorded one."""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import grpc

from quire.client.targets import check_target
from quire.internal.v1 import worker_pb2
from quire.launcher.directory import PrivateDirectory
from quire.launcher.processes import ProcessGroup, ServiceSpec, StartCheck
from quire.service.channels import INTERNAL_MESSAGE_BYTES, channel_options

_READY_TIMEOUT_S = 60.0
_STOP_GRACE_S = 5.0
_SIM_VOCABULARY = re.compile(rb"sim vocab_size=(\d+) ")


@contextmanager
def worker_target(
    address: str | None, hello: worker_pb2.Hello, recording: Path | None = None
) -> Iterator[str]:
    """Yield `address`, or that of a simulated worker with the geometry of `hello`, which runs
    within the context. If the recorded worker was not simulated, the simulated one samples the
    tokens of `recording`. LaunchError if it does not start."""
    if address is not None:
        check_target(address)
        yield address
        return
    with _sim_worker(_flags(hello, recording)) as started:
        yield started


def worker_channel(target: str) -> grpc.Channel:
    return grpc.insecure_channel(target, options=channel_options(INTERNAL_MESSAGE_BYTES))


@contextmanager
def _sim_worker(flags: Mapping[str, object]) -> Iterator[str]:
    """Run a worker with these flags, without the worker's environment variables."""
    directory = PrivateDirectory.make()
    address = f"unix:{directory.path}/worker.sock"
    all_flags = {"engine": "sim", "listen": address, "log-format": "human", **flags}
    spec = ServiceSpec(
        name="worker",
        command=[
            *(sys.executable, "-m", "worker_svc"),
            *(f"--{name}={value}" for name, value in all_flags.items()),
            f"--address-file={directory.path}/worker.address",
        ],
        address_file=directory.path / "worker.address",
        log_file=directory.path / "worker.log",
        environment={k: v for k, v in os.environ.items() if not k.startswith("QUIRE_WORKER_")},
        start_check=StartCheck("model", "serve"),
    )
    group = ProcessGroup()
    try:
        group.start([spec])
        group.wait_until_ready(_READY_TIMEOUT_S)
        yield address
    finally:
        group.stop(_STOP_GRACE_S)
        directory.remove()


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
