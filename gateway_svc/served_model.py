"""The model that this gateway serves: its name at once, its tokenizer when it is loaded."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import grpc

from gateway_svc.detokenizer import TokenTexts, Vocabulary
from gateway_svc.model_files import ModelFiles
from gateway_svc.validation import ModelLimits
from quire.service.errors import RequestError, invalid, unavailable

T = TypeVar("T")

# Of a model without learned positions, until a worker tells its limit: enough for any, and still
# a bound on the work that one request can ask for.
_UNBOUNDED = 2**20


@dataclass(frozen=True)
class Model:
    """A loaded model: its files, what is derived from them, and threads for its text."""

    name: str
    files: ModelFiles
    vocabulary: Vocabulary
    token_texts: TokenTexts
    # The most characters that a token stands for.
    longest_token: int
    threads: ThreadPoolExecutor

    @classmethod
    def of(cls, name: str, files: ModelFiles, threads: ThreadPoolExecutor) -> "Model":
        longest = max(map(len, files.tokenizer.get_vocab(with_added_tokens=True)), default=1)
        vocabulary = Vocabulary.of(files.tokenizer)
        return cls(name, files, vocabulary, TokenTexts(vocabulary), longest, threads)

    def limits(self, max_model_len: int | None) -> ModelLimits:
        """`max_model_len` is the scheduler's; while that is unknown, the model's own holds."""
        files = self.files
        return ModelLimits(
            vocab_size=files.vocab_size,
            max_model_len=max_model_len or files.max_positions or _UNBOUNDED,
            longest_token=self.longest_token,
            eos_token_ids=files.eos_token_ids,
            has_chat_template=files.chat_template is not None,
        )

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        def work() -> list[int]:
            encoding = self.files.tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return list(encoding.ids)

        return await self._in_thread(work)

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        def work() -> str:
            text: str = self.files.tokenizer.decode(
                token_ids, skip_special_tokens=skip_special_tokens
            )
            return text

        return await self._in_thread(work)

    async def render(self, messages: Iterable[dict[str, str]], add_generation_prompt: bool) -> str:
        """TemplateError if the template refuses; the model must have one. `messages` are gone
        through in a thread, too.
        """
        template = self.files.chat_template
        assert template is not None
        return await self._in_thread(lambda: template.render(list(messages), add_generation_prompt))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)


class ServedModel:
    """Holds the one model, once it is there."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._model: Model | None = None

    def loaded(self, model: Model) -> None:
        self._model = model

    def named(self, name: str | None, field: str = "model") -> Model:
        """The model a request asks for; NOT_FOUND if it is another, UNAVAILABLE before it is
        loaded.
        """
        if name is not None and name != self.name:
            raise _unknown(field, name, self.name)
        if self._model is None:
            raise unavailable("MODEL_NOT_LOADED", f"{self.name} is not loaded yet")
        return self._model


def _unknown(field: str, name: str, served: str) -> RequestError:
    description = f"no model {name[:256]!r} is served here, only {served!r}"
    return replace(invalid(field, "UNKNOWN_MODEL", description), code=grpc.StatusCode.NOT_FOUND)
