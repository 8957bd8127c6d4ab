"""Runs the work with transformers' `generate`: one static batch, padded on the left."""

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.engines.child import job, serve
from benchmarks.engines.workload import Work

_PAD = 0


def main() -> None:
    given = job()
    model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32).eval()
    warmup, work = Work.of_json(given["warmup"]), Work.of_json(given["work"])
    serve({"warm": lambda: _run(model, warmup), "run": lambda: _run(model, work)})


@torch.inference_mode()
def _run(model: Any, work: Work) -> dict[str, object]:
    width = max(map(len, work.prompts))
    began_s = time.perf_counter()
    padded = [[_PAD] * (width - len(prompt)) + prompt for prompt in work.prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in work.prompts]
    # The batch runs to its longest output; tokens after the end of a shorter one are dropped.
    written = model.generate(
        torch.tensor(padded),
        attention_mask=torch.tensor(mask),
        max_new_tokens=max(work.num_outputs),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=_PAD,
    )[:, width:].tolist()
    seconds = time.perf_counter() - began_s
    outputs = [tokens[:count] for tokens, count in zip(written, work.num_outputs, strict=True)]
    return {"seconds": seconds, "outputs": outputs}


if __name__ == "__main__":
    main()
