"""The whole of Quire: a private stack on the GPU, asked through its gateway over gRPC."""

from benchmarks.engines.answers import answer, job
from benchmarks.engines.quire_stack import Stack
from benchmarks.engines.workload import Work
from quire.client import Client
from quire.launcher.stack import LocalStack
from quire.operations import Operations


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
        answer({"warm": lambda: _run(stack, warmup), "run": lambda: _run(stack, work)})


def _run(stack: Stack, work: Work) -> dict[str, object]:
    """Without the tokens, of which nobody asks."""
    found = stack.run(work)
    return {key: value for key, value in found.items() if key != "outputs"}


if __name__ == "__main__":
    main()
