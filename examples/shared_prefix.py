"""Prefix caching: requests that begin alike reuse the blocks of the first one."""

import argparse

from quire import Client, SamplingParams

INSTRUCTIONS = "Read the records of a file and return them as a list of tuples. " * 16
QUESTIONS = ["Open the file.", "Close the file.", "Count the records."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:50051", help="default: %(default)s")
    args = parser.parse_args()

    params = SamplingParams(temperature=0, max_tokens=8)
    with Client(args.target) as client:
        for question in QUESTIONS:
            usage = client.generate(INSTRUCTIONS + question, params).usage
            print(f"{usage.prompt_tokens} prompt tokens, {usage.cached_prompt_tokens} cached")

        # A salt separates the cached prefixes of one tenant from those of others.
        salted = client.generate(INSTRUCTIONS, params, cache_salt="tenant-1")
        print(f"with another salt: {salted.usage.cached_prompt_tokens} cached")


if __name__ == "__main__":
    main()
