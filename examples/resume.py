"""Resume a stream in another client: after a restart, or on another machine."""

import argparse
import itertools
import uuid

from quire import Client, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:50051", help="default: %(default)s")
    args = parser.parse_args()

    request_id = str(uuid.uuid4())
    params = SamplingParams(temperature=0.8, max_tokens=64, ignore_eos=True)
    num_tokens = 0
    with Client(args.target) as client:
        # The request continues for 30 s without a client.
        deltas = client.stream_generate(
            "Return the number of", params, request_id=request_id, resume_window_s=30
        )
        for delta in itertools.islice(deltas, 4):
            print(delta.text, end="")
            num_tokens += sum(len(output.token_ids) for output in delta.outputs)
    print(f"\n-- disconnected after {num_tokens} tokens --")

    with Client(args.target) as client:
        for delta in client.resume(request_id, [num_tokens]):
            print(delta.text, end="", flush=True)
            num_tokens += sum(len(output.token_ids) for output in delta.outputs)
    print(f"\n-- {num_tokens} tokens in all --")


if __name__ == "__main__":
    main()
