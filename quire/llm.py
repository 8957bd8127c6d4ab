"""Offline inference, with a private local stack or a running server."""

import logging
import sys
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import fields
from os import PathLike
from typing import Any, Literal, Self, TypeVar, cast, overload

from quire.client.arguments import INT32_MAX, check_integer, wrong_type
from quire.client.client import Client
from quire.client.conversations import Conversation, ConversationOptions
from quire.client.outputs import BeamSearchOutput, RequestDelta, RequestOutput
from quire.client.progress_bar import PromptProgress, UseTqdm
from quire.client.prompts import Prompt, each_conversation, each_prompt, is_conversation
from quire.client.requests import RequestOptions
from quire.client.sampling_params import BeamSearchParams, SamplingParams
from quire.launcher.errors import LaunchError
from quire.launcher.stack import LocalStack
from quire.launcher.start_display import StartDisplay
from quire.service.tls import TLS

log = logging.getLogger(__name__)

_P = TypeVar("_P")
_ACCESS = tuple(
    f"QUIRE_GATEWAY_{name}" for name in ("API_KEYS", "TLS_CERT", "TLS_KEY", "TLS_CLIENT_CA")
)
# Settings of a worker that a stack has its own values for.
_SET_BY_STACK = ("listen", "health_listen", "address_file", "progress_file")
_FIELDS = {field.name for field in fields(SamplingParams)}


class LLM:
    """A model for offline inference.

    `LLM("path/or/id")` starts a private stack. It stops on `close`, at the end of a context, when
    the object is collected, or when Python exits; until then its processes are restarted if they
    end. `LLM(target="host:port")` uses a running server; `model` then selects one of several served
    models.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        target: str | None = None,
        api_key: str | None = None,
        tls: TLS | None = None,
        num_workers: int | None = None,
        revision: str | None = None,
        verbose: bool = False,
        **worker_settings: str | int | float | bool | None,
    ) -> None:
        """`num_workers` is 1 if absent. `worker_settings` are settings of the worker by name, such
        as `block_size=32` or `dtype="bfloat16"`; None is the default. `api_key` and `tls` are
        for a running server.

        ValueError without a model and a target, for a setting with a target or one that the stack
        sets, or for an API key or TLS without a target. LaunchError if the stack does not start.
        """
        if model is None and target is None:
            raise ValueError("LLM needs a model to start or the target of a running server")
        check_integer("num_workers", num_workers, INT32_MAX)
        if not isinstance(model, str | PathLike | None):
            raise wrong_type("model", "a path or an id", model)
        if target is None and (api_key is not None or tls is not None):
            raise ValueError("api_key and tls are for the target of a running server")
        given = {name: value for name, value in worker_settings.items() if value is not None}
        for name in _SET_BY_STACK:
            if target is None and name in given:
                raise ValueError(f"{name}: is set by LLM itself (got {given[name]!r})")
        stack = None
        if target is not None:
            _refuse_settings(
                num_workers=num_workers, revision=revision, verbose=verbose or None, **given
            )
        else:
            stack = _start(
                str(model),
                num_workers=1 if num_workers is None else num_workers,
                revision=revision,
                settings={
                    # The stack is this object's own: its client needs neither a key nor TLS.
                    **dict.fromkeys(_ACCESS),
                    **{f"QUIRE_WORKER_{k.upper()}": str(v) for k, v in given.items()},
                },
                verbose=verbose,
            )
        # A private stack serves one model, which needs no name in requests.
        self._model = None if stack or model is None else str(model)
        self.client = Client(stack.address if stack else str(target), api_key=api_key, tls=tls)
        # Runs once: by `close`, when this object is collected, or at exit.
        self._finalizer = weakref.finalize(self, _close, self.client, stack)

    @overload
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        timeout_s: float | None = None,
        priority: int | None = None,
        use_tqdm: UseTqdm = None,
        return_exceptions: Literal[False] = False,
        **sampling: Any,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        timeout_s: float | None = None,
        priority: int | None = None,
        use_tqdm: UseTqdm = None,
        return_exceptions: bool,
        **sampling: Any,
    ) -> list[RequestOutput | Exception]: ...

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        timeout_s: float | None = None,
        priority: int | None = None,
        use_tqdm: UseTqdm = None,
        return_exceptions: bool = False,
        **sampling: Any,
    ) -> list[RequestOutput] | list[RequestOutput | Exception]:
        """Continue all prompts concurrently; outputs are in the order of the prompts.

        A prompt is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}.
        `sampling_params` are for all prompts, or a list with one entry per prompt. `sampling` has
        fields of SamplingParams in their place, such as `max_tokens=8`. `priority` is that of all
        prompts. `use_tqdm` shows a progress bar, by default for several prompts on a terminal; a
        function is called in place of `tqdm`.

        The first failure is raised as QuireError and cancels all other requests; with
        `return_exceptions` each failure takes the place of its output. ValueError unless there are
        as many sampling parameters as prompts.
        """
        options = self._options(priority, sampling)
        params = _with_fields(sampling_params, sampling)
        return self._generate(
            each_prompt(prompts), params, options, timeout_s, use_tqdm, return_exceptions
        )

    @overload
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        timeout_s: float | None = None,
        priority: int | None = None,
        use_tqdm: UseTqdm = None,
        return_exceptions: Literal[False] = False,
        **sampling: Any,
    ) -> list[RequestOutput]: ...

    @overload
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        timeout_s: float | None = None,
        priority: int | None = None,
        use_tqdm: UseTqdm = None,
        return_exceptions: bool,
        **sampling: Any,
    ) -> list[RequestOutput | Exception]: ...

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        timeout_s: float | None = None,
        priority: int | None = None,
        use_tqdm: UseTqdm = None,
        return_exceptions: bool = False,
        **sampling: Any,
    ) -> list[RequestOutput] | list[RequestOutput | Exception]:
        """Continue one or several conversations: lists of {"role": ..., "content": ...}. Arguments
        are those of `generate`; options of conversations, such as `tools`, `tool_choice` and
        `chat_template_kwargs`, are arguments, too."""
        options = self._options(priority, sampling)
        params = _with_fields(sampling_params, sampling)
        return self._generate(
            each_conversation(messages), params, options, timeout_s, use_tqdm, return_exceptions
        )

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        priority: int | None = None,
        **sampling: Any,
    ) -> Generator[RequestDelta, None, None]:
        """Stream the output of one prompt, which may be a conversation. Closing the generator
        cancels the request."""
        options = self._options(priority, sampling)
        params = _with_fields(sampling_params, sampling)
        return self.client.stream_generate(prompt, params, timeout_s=timeout_s, **options)

    def stream_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        priority: int | None = None,
        **sampling: Any,
    ) -> Generator[RequestDelta, None, None]:
        """Stream the output of one conversation. Closing the generator cancels the request."""
        if not is_conversation(messages):
            raise wrong_type("messages", "one conversation", messages)
        return self.stream(
            messages, sampling_params, timeout_s=timeout_s, priority=priority, **sampling
        )

    def beam_search(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: BeamSearchParams | None = None,
        *,
        timeout_s: float | None = None,
        priority: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Find the most likely continuations of all prompts concurrently, by beam search; outputs
        are in the order of the prompts. The first failure is raised as QuireError and cancels all
        other searches."""
        options = self._options(priority, {})
        return self.client.beam_search_all(
            each_prompt(prompts), params, timeout_s=timeout_s, **options
        )

    def close(self) -> None:
        """Cancel all calls in progress and stop the private stack."""
        self._finalizer()

    def _options(self, priority: int | None, given: dict[str, Any]) -> RequestOptions:
        """The options of a request. Takes those of conversations out of what is given."""
        names = [name for name in given if name in ConversationOptions.__annotations__]
        of_conversation = {name: given.pop(name) for name in names}
        options = {"model": self._model, "priority": priority, **of_conversation}
        return cast("RequestOptions", options)

    def _generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None,
        options: RequestOptions,
        timeout_s: float | None,
        use_tqdm: UseTqdm,
        return_exceptions: bool,
    ) -> list[RequestOutput | Exception]:
        each = _per_prompt(sampling_params, len(prompts))
        with PromptProgress(len(prompts), use_tqdm) as progress:
            return self.client.generate_all(
                prompts,
                each,
                timeout_s=timeout_s,
                return_exceptions=return_exceptions,
                on_end=progress.advance,
                **options,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _start(model: str, *, verbose: bool, **options: Any) -> LocalStack:
    """Start a private stack. Its progress is shown on a terminal, else logged."""
    display = StartDisplay(sys.stderr, log.info, has_logs=verbose)
    stack = LocalStack(
        model,
        verbose=verbose,
        # Calls would wait for ever for a process that has ended.
        restart=True,
        on_wait=display.on_wait,
        on_progress=display.on_progress,
        # Refers to no LLM, which would then never be collected.
        on_end=_warn,
        **options,
    )
    try:
        return stack.start()
    finally:
        display.clear()


def _warn(end: LaunchError) -> None:
    log.warning("%s\nRestarting it ...", end)


def _close(client: Client, stack: LocalStack | None) -> None:
    client.close()
    if stack is not None:
        stack.stop()


def _refuse_settings(**given: object) -> None:
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise ValueError(f"settings of a running server cannot be set: {', '.join(names)}")


def _with_fields(params: _P, given: Mapping[str, Any]) -> _P | SamplingParams:
    """The parameters, or those of these fields. TypeError for both, or for another field."""
    if not given:
        return params
    if params is not None:
        raise TypeError(f"sampling_params is set, so {', '.join(given)} cannot be")
    for name in given:
        if name not in _FIELDS:
            raise TypeError(f"{name}: no such argument, and no field of SamplingParams")
    return SamplingParams(**given)


def _per_prompt(
    sampling_params: SamplingParams | Sequence[SamplingParams | None] | None, count: int
) -> Sequence[SamplingParams | None]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    if isinstance(sampling_params, str | bytes) or not isinstance(sampling_params, Sequence):
        raise wrong_type("sampling_params", "SamplingParams, or a list of them", sampling_params)
    if len(sampling_params) != count:
        raise ValueError(f"{len(sampling_params)} sampling parameters for {count} prompts")
    return sampling_params
