"""Quire over HTTP, with OpenAI's own client.

Usage: openai_client.py {stream,chat,cancel,resume,errors} URL...
"""

import sys
import time
import uuid
from collections.abc import Sequence
from itertools import cycle

from openai import APIError, APIStatusError, OpenAI


def stream(client: OpenAI) -> None:
    chunks = client.completions.create(
        model=model(client), prompt="Return the number of", max_tokens=32, seed=1, stream=True
    )
    for chunk in chunks:
        print(chunk.choices[0].text, end="", flush=True)
    print()


def chat(client: OpenAI) -> None:
    completion = client.chat.completions.create(
        model=model(client),
        messages=[{"role": "user", "content": "What does this function return?"}],
        max_completion_tokens=32,
        seed=1,
    )
    print(completion.choices[0].message.content)


def cancel(client: OpenAI) -> None:
    """Cancel a response by its id. A stream that is closed ends its request, too."""
    response = client.responses.create(
        model=model(client), input="Return a list of", max_output_tokens=400, background=True
    )
    print(client.responses.cancel(response.id).status)


def resume(clients: Sequence[OpenAI]) -> None:
    """Send the request again under its id, at the next gateway: it returns the same output from the
    start, of which the first characters are known."""
    request_id = str(uuid.uuid4())
    num_characters = 0
    for num_failures, client in enumerate(cycle(clients)):
        try:
            chunks = client.completions.create(
                model=model(client),
                prompt="Open the file",
                max_tokens=200,
                seed=1,
                stream=True,
                extra_body={"resume_window_s": 30, "ignore_eos": True},
                extra_headers={"X-Request-Id": request_id},
            )
            position = 0
            for chunk in chunks:
                text = chunk.choices[0].text
                print(text[max(num_characters - position, 0) :], end="", flush=True)
                position += len(text)
                num_characters = max(num_characters, position)
            print()
            return
        except APIError as error:
            if isinstance(error, APIStatusError) and error.status_code < 500:
                raise
        time.sleep(min(0.05 * 2**num_failures, 2))


def errors(client: OpenAI) -> None:
    try:
        client.completions.create(model=model(client), prompt="a", top_p=2)
    except APIStatusError as error:
        print(f"{error.status_code}: {error.response.json()['error']['message']}")
        print("param:", error.param)
        print("code:", error.code)
        if delay := error.response.headers.get("retry-after"):
            print(f"retry-after: {delay} s")


def model(client: OpenAI) -> str:
    return client.models.list().data[0].id


def main() -> None:
    step, *urls = sys.argv[1:]
    clients = [OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) for url in urls]
    if step == "resume":
        resume(clients)
    else:
        {"stream": stream, "chat": chat, "cancel": cancel, "errors": errors}[step](clients[0])


if __name__ == "__main__":
    main()
