"""Runs vLLM's CPU build in process, in the Python of vLLM's environment."""

from collections.abc import Iterator, Sequence

from vllm import LLM, SamplingParams

from benchmarks.engines.child import job
from benchmarks.engines.types.serving import Prompt, serve_engine


class VllmEngine:
    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def run(self, prompts: Sequence[Prompt], num_outputs: int) -> list[int]:
        written = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            _params(num_outputs),
            use_tqdm=False,
        )
        return [len(request.outputs[0].token_ids) for request in written]

    def stream(self, prompt: Prompt, num_outputs: int) -> Iterator[int]:
        engine = self._llm.llm_engine
        engine.add_request("stream", {"prompt_token_ids": prompt}, _params(num_outputs))
        num_written = 0
        while engine.has_unfinished_requests():
            for request in engine.step():
                if count := len(request.outputs[0].token_ids) - num_written:
                    num_written += count
                    yield count


def _params(num_outputs: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True)


def main() -> None:
    given = job()
    llm = LLM(
        given["model"],
        dtype="bfloat16",
        max_model_len=given["max_model_len"],
        max_num_seqs=given["max_num_seqs"],
        enable_prefix_caching=False,
        enforce_eager=True,
    )
    serve_engine(VllmEngine(llm), given)


if __name__ == "__main__":
    main()
