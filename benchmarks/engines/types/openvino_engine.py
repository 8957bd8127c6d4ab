"""Runs OpenVINO GenAI in process, in the Python of its environment."""

import os
from collections.abc import Iterator, Sequence

import numpy as np
import openvino
import openvino_genai

from benchmarks.engines.child import job
from benchmarks.engines.types.serving import Prompt, serve_engine

_CACHE_GB = 2
_MAX_NUM_BATCHED_TOKENS = 2048


class OpenvinoEngine:
    def __init__(self, pipeline: openvino_genai.ContinuousBatchingPipeline) -> None:
        self._pipeline = pipeline
        self._num_streams = 0

    def run(self, prompts: Sequence[Prompt], num_outputs: int) -> list[int]:
        configs = [_config(num_outputs)] * len(prompts)
        written = self._pipeline.generate([_tensor(prompt) for prompt in prompts], configs)
        return [len(request.m_generation_ids[0]) for request in written]

    def stream(self, prompt: Prompt, num_outputs: int) -> Iterator[int]:
        self._num_streams += 1
        handle = self._pipeline.add_request(
            self._num_streams, _tensor(prompt), _config(num_outputs)
        )
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            while handle.can_read():
                yield sum(len(output.generated_ids) for output in handle.read().values())


def _tensor(prompt: Prompt) -> openvino.Tensor:
    return openvino.Tensor(np.array([prompt], dtype=np.int64))


def _config(num_outputs: int) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = num_outputs
    config.do_sample = False
    # It must be a token, although it is ignored.
    config.set_eos_token_id(0)
    config.ignore_eos = True
    return config


def main() -> None:
    given = job()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = _CACHE_GB
    scheduler.max_num_batched_tokens = _MAX_NUM_BATCHED_TOKENS
    scheduler.max_num_seqs = given["max_num_seqs"]
    scheduler.enable_prefix_caching = False
    properties = {
        "INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0)),
        "INFERENCE_PRECISION_HINT": "bf16",
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        given["model"], scheduler, "CPU", properties
    )
    serve_engine(OpenvinoEngine(pipeline), given)


if __name__ == "__main__":
    main()
