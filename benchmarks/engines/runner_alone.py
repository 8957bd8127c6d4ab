"""Runs the work on the worker's runner in process: no gRPC, no Redis, no gateway."""

import importlib
import time

from benchmarks.engines.batcher import steps
from benchmarks.engines.child import job, serve
from benchmarks.engines.workload import MAX_MODEL_LEN, MAX_NUM_SEQS, Work
from worker_svc.plan.plans import plan_from_proto
from worker_svc.runner.step_runner import LoadedRunner
from worker_svc.service.process import prepare_process
from worker_svc.settings import WorkerSettings


def main() -> None:
    # The same settings as in the worker.
    prepare_process()
    load_runner = importlib.import_module("worker_svc.loading.runner_loading").load_runner
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
    loaded = load_runner(settings)
    warmup, work = Work.of_json(given["warmup"]), Work.of_json(given["work"])
    serve({"warm": lambda: _run(loaded, warmup), "run": lambda: _run(loaded, work)})


def _run(loaded: LoadedRunner, work: Work) -> dict[str, object]:
    identity = loaded.identity
    outputs: list[list[int]] = [[] for _ in work.prompts]
    began_s = time.perf_counter()
    for step in steps(
        work,
        max_num_seqs=identity.max_num_seqs,
        max_num_batched_tokens=identity.max_num_batched_tokens,
        block_size=identity.block_size,
        num_blocks=identity.num_blocks,
    ):
        output = loaded.runner.launch(plan_from_proto(step.plan)).output()
        for row, token_id in zip(output.sampled_rows, output.sampled_token_ids, strict=True):
            outputs[step.sampling[row]].append(token_id)
    seconds = time.perf_counter() - began_s
    loaded.runner.clear()
    return {"seconds": seconds, "outputs": outputs}


if __name__ == "__main__":
    main()
