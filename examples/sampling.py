"""Sampling parameters: seeds, several choices of one prompt, stop strings, log-probabilities."""

import argparse

from quire import Client, SamplingParams

PROMPT = "Return a list of"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:50051", help="default: %(default)s")
    args = parser.parse_args()

    with Client(args.target) as client:
        seeded = SamplingParams(temperature=1.0, top_k=50, seed=7, max_tokens=16)
        first, second = (client.generate(PROMPT, seeded).outputs[0].text for _ in range(2))
        print(f"same seed, same text: {first == second}")

        # The choices share the prompt's prefill.
        several = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=16)
        for choice in client.generate(PROMPT, several).outputs:
            print(f"choice {choice.index}: {choice.text!r}")

        stopped = SamplingParams(temperature=0, stop=[".", ","], max_tokens=64)
        completion = client.generate(PROMPT, stopped).outputs[0]
        print(f"ended by {completion.finish_reason}, {completion.stop_reason!r}")

        likely = SamplingParams(temperature=0, logprobs=3, max_tokens=4)
        for candidates in client.generate(PROMPT, likely).outputs[0].logprobs:
            shown = (f"{one.decoded_token!r} {one.logprob:.2f}" for one in candidates.values())
            print("most likely:", ", ".join(shown))


if __name__ == "__main__":
    main()
