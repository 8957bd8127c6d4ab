"""Concurrent streams in one event loop."""

import argparse
import asyncio
import time

from quire import AsyncClient, QuireError, SamplingParams

PROMPTS = [f"Return the first {count} items of" for count in range(2, 10)]


async def stream(client: AsyncClient, prompt: str) -> str:
    params = SamplingParams(temperature=0.8, max_tokens=32, ignore_eos=True)
    started_s, first_token_s, text = time.monotonic(), None, ""
    # Closing the generator, or cancelling the task, cancels the request on the server.
    async for delta in client.stream_generate(prompt, params, timeout_s=60):
        if first_token_s is None and delta.outputs:
            first_token_s = time.monotonic() - started_s
        text += delta.text
    return f"{prompt!r}: first token after {first_token_s:.3f} s -> {text!r}"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:50051", help="default: %(default)s")
    args = parser.parse_args()

    async with AsyncClient(args.target) as client:
        streams = (stream(client, prompt) for prompt in PROMPTS)
        for result in await asyncio.gather(*streams, return_exceptions=True):
            print(f"failed: {result}" if isinstance(result, QuireError) else result)


if __name__ == "__main__":
    asyncio.run(main())
