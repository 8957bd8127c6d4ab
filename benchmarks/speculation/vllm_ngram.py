"""Runs works with vLLM, with or without its ngram speculation, in the Python of its environment."""

import time
from functools import partial

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
        speculative_config=given["speculative_config"],
    )
    serve({"run": partial(_run, llm, given["prompts"], given["num_tokens"])})


def _run(llm: LLM, prompts: list[list[int]], num_tokens: int) -> dict[str, object]:
    """Write greedily from all prompts at once."""
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    began_s = time.perf_counter()
    llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        [params] * len(prompts),
        use_tqdm=False,
    )
    return {"seconds": time.perf_counter() - began_s}


if __name__ == "__main__":
    main()
