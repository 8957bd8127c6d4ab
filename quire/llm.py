"""Offline inference in a few lines: a model in a private local stack, or on a running server."""

import weakref
from collections.abc import Generator, Iterable, Sequence
from typing import Self

from quire.arguments import wrong_type
from quire.client import Client
from quire.launcher.stack import LocalStack
from quire.outputs import RequestDelta, RequestOutput
from quire.prompts import Conversation, Prompt, each_conversation, each_prompt
from quire.sampling import SamplingParams


class LLM:
    """A model to ask.

    `LLM("path/or/id")` starts a stack of its own and stops it on `close`, at the end of the
    context, when the object is collected, or when Python exits. `LLM(target="host:port")` talks to
    a running server, where `model` may name one of several served models.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        target: str | None = None,
        num_workers: int | None = None,
        revision: str | None = None,
        verbose: bool = False,
        **worker_settings: str | int | float | bool | None,
    ) -> None:
        """`num_workers` is 1 if absent. `worker_settings` are settings of the worker by their
        names: `block_size=32`, `dtype="bfloat16"`, `max_model_len=4096`; None leaves one alone.

        ValueError unless there is a model or a target, or if a running server is to be set.
        LaunchError if the stack does not start.
        """
        if model is None and target is None:
            raise ValueError("LLM needs a model to start or the target of a running server")
        given = {name: value for name, value in worker_settings.items() if value is not None}
        stack = None
        if target is not None:
            _refuse_settings(
                num_workers=num_workers, revision=revision, verbose=verbose or None, **given
            )
        else:
            stack = LocalStack(
                str(model),
                num_workers=1 if num_workers is None else num_workers,
                revision=revision,
                settings={f"QUIRE_WORKER_{k.upper()}": str(v) for k, v in given.items()},
                verbose=verbose,
            ).start()
        # A private stack serves one.
        self._model = None if stack else model
        self.client = Client(stack.address if stack else str(target))
        # Runs once: by `close`, when nobody refers to this object any more, or at exit.
        self._finalizer = weakref.finalize(self, _close, self.client, stack)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        timeout_s: float | None = None,
        priority: int | None = None,
    ) -> list[RequestOutput]:
        """Continues all prompts at once; outputs come in the order of the prompts.

        A prompt is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}.
        `sampling_params` is one for all or one for each; their `n` is the number of completions
        that a prompt's output has. `priority` is that of all prompts. The first prompt that fails
        raises its QuireError and cancels the others. ValueError unless there are as many sampling
        parameters as prompts.
        """
        return self._generate(each_prompt(prompts), sampling_params, timeout_s, priority)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        timeout_s: float | None = None,
        priority: int | None = None,
    ) -> list[RequestOutput]:
        """Answers a conversation, a list of {"role": ..., "content": ...}, or several."""
        return self._generate(each_conversation(messages), sampling_params, timeout_s, priority)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        priority: int | None = None,
    ) -> Generator[RequestDelta, None, None]:
        """One prompt's output as it is written. Closing the generator cancels the request."""
        return self.client.stream_generate(
            prompt, sampling_params, timeout_s=timeout_s, model=self._model, priority=priority
        )

    def close(self) -> None:
        """Ends the calls in progress and stops the private stack."""
        self._finalizer()

    def _generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None,
        timeout_s: float | None,
        priority: int | None,
    ) -> list[RequestOutput]:
        each = _for_each(sampling_params, len(prompts))
        return self.client.generate_all(
            prompts, each, timeout_s=timeout_s, model=self._model, priority=priority
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _close(client: Client, stack: LocalStack | None) -> None:
    client.close()
    if stack is not None:
        stack.stop()


def _refuse_settings(**given: object) -> None:
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise ValueError(f"a running server has its settings: {', '.join(names)}")


def _for_each(
    sampling_params: SamplingParams | Sequence[SamplingParams | None] | None, count: int
) -> Sequence[SamplingParams | None]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    if isinstance(sampling_params, str | bytes) or not isinstance(sampling_params, Sequence):
        raise wrong_type("sampling_params", "SamplingParams, or a list of them", sampling_params)
    if len(sampling_params) != count:
        raise ValueError(f"{len(sampling_params)} sampling parameters for {count} prompts")
    return sampling_params
