"""The worker's runner in one process with a minimal scheduler: no gRPC, no Redis, no gateway."""

import importlib
import time

from benchmarks.engines.answers import answer, job
from benchmarks.engines.batcher import steps
from benchmarks.engines.workload import MAX_MODEL_LEN, MAX_NUM_SEQS, Work
from worker_svc.engine import Engine
from worker_svc.plans import plan_from_proto
from worker_svc.process import prepare_process
from worker_svc.settings import WorkerSettings


def main() -> None:
    # As the worker does.
    prepare_process()
    load_engine = importlib.import_module("worker_svc.torch_engine").load_engine
    given = job()
    flags = {
        "model": given["model"],
        "dtype": "float32",
        "device": "cpu",
        "max-model-len": MAX_MODEL_LEN,
        "max-num-seqs": MAX_NUM_SEQS,
        "kv-cache-memory": given["kv_cache_bytes"],
    }
    settings = WorkerSettings.load([f"--{key}={value}" for key, value in flags.items()])
    engine = load_engine(settings)
    warmup, work = Work.of_json(given["warmup"]), Work.of_json(given["work"])
    answer({"warm": lambda: _run(engine, warmup), "run": lambda: _run(engine, work)})


def _run(engine: Engine, work: Work) -> dict[str, object]:
    identity = engine.identity
    outputs: list[list[int]] = [[] for _ in work.prompts]
    began_s = time.perf_counter()
    for step in steps(
        work,
        max_num_seqs=identity.max_num_seqs,
        max_num_batched_tokens=identity.max_num_batched_tokens,
        block_size=identity.block_size,
        num_blocks=identity.num_blocks,
    ):
        output = engine.runner.run(plan_from_proto(step.plan))
        for row, token_id in zip(output.sampled_rows, output.sampled_token_ids, strict=True):
            outputs[step.sampling[row]].append(token_id)
    seconds = time.perf_counter() - began_s
    engine.runner.clear()
    return {"seconds": seconds, "outputs": outputs}


if __name__ == "__main__":
    main()
