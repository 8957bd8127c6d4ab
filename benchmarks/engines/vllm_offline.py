"""Runs the work with `LLM.generate` of vLLM's CPU build, in the Python of vLLM's environment."""

import time

import vllm
from vllm import LLM, SamplingParams

from benchmarks.engines.child import job, serve


def main() -> None:
    given = job()
    llm = LLM(
        given["model"],
        dtype="float32",
        max_model_len=given["max_model_len"],
        max_num_seqs=given["max_num_seqs"],
        enforce_eager=True,
    )
    serve(
        {
            "warm": lambda: _run(llm, **given["warmup"]),
            "run": lambda: _run(llm, **given["work"]),
            "version": lambda: vllm.__version__,
        }
    )


def _run(
    llm: LLM, prompts: list[list[int]], num_outputs: list[int], temperature: float
) -> dict[str, object]:
    """Run the work, given as the fields of `Work`."""
    llm.reset_prefix_cache()
    began_s = time.perf_counter()
    written = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        [
            SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True)
            for count in num_outputs
        ],
        use_tqdm=False,
    )
    seconds = time.perf_counter() - began_s
    outputs = [list(request.outputs[0].token_ids) for request in written]
    return {"seconds": seconds, "outputs": outputs}


if __name__ == "__main__":
    main()
