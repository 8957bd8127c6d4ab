"""Offline batch inference: `LLM` starts a private local stack, or uses a running server."""

import argparse

from quire import LLM, SamplingParams

PROMPTS = ["Return the number of", "Raise an exception if", "Open the file and"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo/model", help="folder or Hugging Face id")
    parser.add_argument("--target", help="a running server instead of --model")
    args = parser.parse_args()

    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=32)
    with LLM(None if args.target else args.model, target=args.target) as llm:
        # All prompts run in one batch; outputs are in the order of the prompts.
        for output in llm.generate(PROMPTS, params):
            completion = output.outputs[0]
            print(f"{output.prompt!r} -> {completion.text!r} ({completion.finish_reason})")


if __name__ == "__main__":
    main()
