"""A multi-turn conversation with the model's chat template; replies are streamed."""

import argparse

from quire import Client, SamplingParams

# The demo model continues the user's text; other models reply to it.
MESSAGES = ["Return the number of", "Raise an exception if"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:50051", help="default: %(default)s")
    args = parser.parse_args()

    params = SamplingParams(temperature=0.7, max_tokens=48, seed=1)
    messages: list[dict[str, str]] = []
    with Client(args.target) as client:
        for content in MESSAGES:
            print(f"user: {content}\nassistant: ", end="")
            messages.append({"role": "user", "content": content})
            reply = ""
            for delta in client.stream_generate(messages, params):
                print(delta.text, end="", flush=True)
                reply += delta.text
            print()
            # The next request shares this prefix, so that the prefix cache serves it.
            messages.append({"role": "assistant", "content": reply})


if __name__ == "__main__":
    main()
