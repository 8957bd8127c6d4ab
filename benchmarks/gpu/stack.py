"""Runs the work on a private stack on the GPU through its gateway over gRPC."""

from benchmarks.engines.child import job, serve
from benchmarks.engines.quire_stack import Stack
from benchmarks.engines.workload import Work
from quire.client.client import Client
from quire.client.operations import Operations
from quire.launcher.stack import LocalStack


def main() -> None:
    given = job()
    warmup, work = Work.of_json(given["warmup"]), Work.of_json(given["work"])
    local = LocalStack(given["model"], settings=given["settings"])
    with (
        local,
        Client(local.address) as client,
        Operations(local.scheduler_address) as operations,
    ):
        stack = Stack(local, client, operations)
        serve({"warm": lambda: _run(stack, warmup), "run": lambda: _run(stack, work)})


def _run(stack: Stack, work: Work) -> dict[str, object]:
    """Run the work; the result omits the generated tokens."""
    found = stack.run(work)
    return {key: value for key, value in found.items() if key != "outputs"}


if __name__ == "__main__":
    main()
