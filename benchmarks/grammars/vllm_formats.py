"""Runs formats with `LLM.generate` of vLLM's CPU build, in the Python of vLLM's environment."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import vllm
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from benchmarks.engines.child import Handler, job, serve


def main() -> None:
    given = job()
    llm = LLM(
        given["model"],
        dtype="float32",
        max_model_len=given["max_model_len"],
        max_num_seqs=given["max_num_seqs"],
        enforce_eager=True,
    )
    handlers: dict[str, Handler] = {"version": lambda: vllm.__version__}
    for name, formats in given["formats"].items():
        handlers[name] = partial(
            _run, llm, given["prompts"], formats, given["num_tokens"], given["stop_token_id"]
        )
    serve(handlers)


def _run(
    llm: LLM,
    prompts: Sequence[list[int]],
    formats: Sequence[Any],
    num_tokens: int,
    stop_token_id: int,
) -> Mapping[str, object]:
    llm.reset_prefix_cache()
    params = [
        SamplingParams(
            temperature=1.0,
            max_tokens=num_tokens,
            ignore_eos=one is None,
            stop_token_ids=None if one is None else [stop_token_id],
            structured_outputs=None if one is None else StructuredOutputsParams(**one),
        )
        for one in formats
    ]
    began_s = time.perf_counter()
    written = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    seconds = time.perf_counter() - began_s
    return {
        "seconds": seconds,
        "num_outputs": [len(request.outputs[0].token_ids) for request in written],
    }


if __name__ == "__main__":
    main()
