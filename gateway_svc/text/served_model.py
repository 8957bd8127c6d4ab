"""The model that this gateway serves, and its limits on requests."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import grpc
from google.protobuf import json_format

from gateway_svc.output_formats.formats import ModelFormats, choose
from gateway_svc.structured.compiler import StructuredOutputCompiler
from gateway_svc.text import chat_messages
from gateway_svc.text.chat_template import TemplateError
from gateway_svc.text.detokenizer import TokenTexts, Vocabulary
from gateway_svc.text.model_files import ModelFiles
from gateway_svc.text.text_offsets import text_offsets
from gateway_svc.text.token_bytes import TokenBytes
from quire.service.errors import RequestError, failed, invalid, unavailable
from quire.v1 import conversation_pb2

T = TypeVar("T")

# Sequence length of a model without learned positions, until the workers' limit is known: enough
# for any model, and still a bound on the work of one request.
_DEFAULT_MAX_MODEL_LEN = 2**20


@dataclass(frozen=True)
class ModelLimits:
    """The limits of a model that requests are checked against."""

    vocab_size: int
    # Prompt and output together, in tokens.
    max_model_len: int
    # The most characters that one token stands for.
    longest_token: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool


@dataclass(frozen=True)
class Model:
    """A loaded model: its files, data derived from them, and threads to tokenize and render in."""

    name: str
    files: ModelFiles
    vocabulary: Vocabulary
    token_texts: TokenTexts
    token_bytes: TokenBytes
    # The most characters that one token stands for.
    longest_token: int
    threads: ThreadPoolExecutor
    structured: StructuredOutputCompiler
    # In which the model writes calls of tools and reasoning.
    formats: ModelFormats = field(default_factory=ModelFormats)

    @classmethod
    def from_files(
        cls,
        name: str,
        files: ModelFiles,
        threads: ThreadPoolExecutor,
        formats: ModelFormats | None = None,
    ) -> "Model":
        """`formats` are those of the chat template by default."""
        vocabulary = Vocabulary.from_tokenizer(files.tokenizer, files.special_tokens)
        texts = TokenTexts(vocabulary)
        return cls(
            name,
            files,
            vocabulary,
            texts,
            TokenBytes(vocabulary, texts),
            vocabulary.longest_token,
            threads,
            StructuredOutputCompiler(files.tokenizer, files.vocab_size),
            formats or choose(files.template_source),
        )

    def limits(self, max_model_len: int | None) -> ModelLimits:
        """`max_model_len` is the scheduler's; while it is None, the model's own applies."""
        files = self.files
        return ModelLimits(
            vocab_size=files.vocab_size,
            max_model_len=max_model_len or files.max_positions or _DEFAULT_MAX_MODEL_LEN,
            longest_token=self.longest_token,
            eos_token_ids=files.eos_token_ids,
            has_chat_template=files.chat_template is not None,
        )

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return await self._in_thread(lambda: self._token_ids(text, add_special_tokens))

    async def encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize short texts, without special tokens."""

        return await self._in_thread(lambda: [self._token_ids(text, False) for text in texts])

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        def work() -> str:
            vocabulary = self.vocabulary
            visible = vocabulary.plain_ids if skip_special_tokens else vocabulary.known_ids
            shown = [id_ for id_ in token_ids if id_ in visible]
            text: str = vocabulary.tokenizer.decode_batch([shown], skip_special_tokens=False)[0]
            return text

        return await self._in_thread(work)

    async def text_offsets(self, token_ids: Sequence[int], text: str) -> list[int]:
        """The characters of a tokenized text before each token."""
        return await self._in_thread(lambda: text_offsets(self.vocabulary, token_ids, text))

    async def render(self, conversation: conversation_pb2.Conversation) -> str:
        """Render a conversation. RequestError if the chat template refuses it. The model must have
        a template.
        """
        add = conversation.add_generation_prompt or not conversation.HasField(
            "add_generation_prompt"
        )

        variables = _template_variables(conversation)

        def work() -> str:
            messages = chat_messages.messages(conversation)
            tools = chat_messages.tools(conversation)
            template = self.files.chat_template
            if tools is not None and self.files.tool_template is not None:
                template = self.files.tool_template
            assert template is not None
            documents = chat_messages.documents(conversation)
            if documents is not None and not template.has_documents:
                raise TemplateError("it renders no documents; write them into a message")
            if conversation.continue_final_message:
                return template.render_continued(messages, variables, tools, documents)
            return template.render(messages, add, variables, tools, documents)

        try:
            return await self._in_thread(work)
        except TemplateError as error:
            reason = f"is refused by the chat template: {error}"
            raise invalid("conversation", "CHAT_TEMPLATE_REFUSES", reason) from error

    def _token_ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """In a thread. Only the library's calls for batches release the interpreter's lock; with
        the others the event loop would wait, for seconds with the longest texts. "Fast" ones have
        no offsets."""
        encode = self.files.tokenizer.encode_batch_fast
        return list(encode([text], add_special_tokens=add_special_tokens)[0].ids)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)


def _template_variables(conversation: conversation_pb2.Conversation) -> dict[str, Any]:
    """The variables for the chat template. Whole numbers are integers, as in JSON. Keys are sorted:
    protobuf's maps have another order in each process, and the same request has the same prompt."""

    def plain(value: Any) -> Any:
        match value:
            case dict():
                return {key: plain(value[key]) for key in sorted(value)}
            case list():
                return [plain(item) for item in value]
            case float() if value.is_integer():
                return int(value)
        return value

    variables: dict[str, Any] = plain(json_format.MessageToDict(conversation.chat_template_kwargs))
    return variables


class ServedModel:
    """The model, once it is loaded, and its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._model: Model | None = None

    @property
    def is_set(self) -> bool:
        return self._model is not None

    def set(self, model: Model) -> None:
        self._model = model

    def get(self, name: str | None, field: str | None = "model") -> Model:
        """Return the model; None for `name` matches any. RequestError NOT_FOUND, at `field` if the
        request has one, if another model is requested; UNAVAILABLE before the model is loaded.
        """
        if name is not None and name != self.name:
            raise _unknown(field, name, self.name)
        if self._model is None:
            raise unavailable("MODEL_NOT_LOADED", f"{self.name} is not loaded yet")
        return self._model


def _unknown(field: str | None, name: str, served: str) -> RequestError:
    description = f"no model {name[:256]!r} is served here, only {served!r}"
    if field is None:
        return failed(grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL", description)
    return replace(invalid(field, "UNKNOWN_MODEL", description), code=grpc.StatusCode.NOT_FOUND)
