"""Random calls to all public methods: typed ones, mutated ones, and bytes of no type."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import struct_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from quire.v1 import beam_search_pb2, inference_pb2, model_pb2, tokenizer_pb2

FORBIDDEN = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}
SERVICES = [
    *inference_pb2.DESCRIPTOR.services_by_name.values(),
    *beam_search_pb2.DESCRIPTOR.services_by_name.values(),
    *model_pb2.DESCRIPTOR.services_by_name.values(),
    *tokenizer_pb2.DESCRIPTOR.services_by_name.values(),
    *health_pb2.DESCRIPTOR.services_by_name.values(),
    *reflection_pb2.DESCRIPTOR.services_by_name.values(),
]
# Bound of a call whose request runs on; a few have shorter ones.
TIMEOUT_S = 10.0
_NUM_IDS = 40
# Shares of values that are drawn from all of their type instead of the usual ones.
_WILD = (0.0, 0.02, 0.3)
# Usual values of numbers, from 0.
_USUAL: dict[str, float] = {
    "n": 4, "max_tokens": 40, "logprobs": 20, "resume_window_s": 60, "ids": 500, "top_k": 50,
    "beam_width": 4,
    "next_token_indices": 5, "stop_token_ids": 500, "token_ids": 500, "priority": 9, "seed": 2**32,
    "temperature": 2.0, "top_p": 1.0, "min_p": 0.5, "presence_penalty": 2.0,
    "frequency_penalty": 2.0, "repetition_penalty": 2.0, "min_tokens": 2, "typical_p": 1.0,
    "truncate_prompt_tokens": 40, "key": 400, "value": 9.0,
}  # fmt: skip
# Fields of these messages that few requests set, as most values of theirs are refused.
_RARE = {
    "allowed_token_ids", "detokenize", "structured_output", "tools", "tool_choice",
    "parallel_tool_calls", "include_reasoning", "tool_calls", "tool_call_id", "reasoning", "name",
}  # fmt: skip
_WITH_RARE = ("quire.v1.SamplingParams", "quire.v1.Conversation", "quire.v1.Message")
_STRINGS = (
    "", "a", "Return", "demo", "nope", "user", "assistant", "system", "tool", "\x00", "\r\n\x1b[2J",
    "é🦊\u200d", "{{ 7 * 7 }}", "{% raw %}", "ready", "quire.v1.InferenceService", "<|endoftext|>",
    "x" * 129, "a b " * 300, "🦊" * 3000, "t" * 200_000,
)  # fmt: skip
_INTEGERS = (0, 1, 2, 3, 5, 20, 21, 64, 1000, 4096, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**64 - 1)
_FLOATS = (0.0, -0.0, 0.5, 1.0, 2.0, -1.0, 1e-45, 3e38, float("inf"), float("-inf"), float("nan"))
# Field numbers and wire types that no message of ours has, and some that it has otherwise.
_TAGS = (b"\x00", b"\x07", b"\x0b", b"\x0c", b"\xfa\x07\x01a", b"\xff\xff\xff\xff\x0f", b"\x0a\xff")


@dataclass(frozen=True)
class Call:
    """A call to make. Calls without `cancel_after_s` run until their end or `timeout_s`."""

    path: str
    data: bytes
    request_streams: bool
    response_streams: bool
    timeout_s: float
    cancel_after_s: float | None


@dataclass(frozen=True)
class Failed:
    """A call that ended with a forbidden status."""

    call: Call
    code: grpc.StatusCode
    details: str


class Generator:
    """Draws calls; the same seed gives the same ones."""

    def __init__(self, seed: int, model: str) -> None:
        """`model`: the name of the served model."""
        self._rng = random.Random(seed)
        self._model = model
        # Of the current call.
        self._wild = 0.0
        self._is_within_many = False
        self._methods = [method for service in SERVICES for method in service.methods]
        # Requests of several types, to be spliced into each other.
        self._recent: list[bytes] = [b""]

    def calls(self, count: int) -> Iterator[Call]:
        for _ in range(count):
            yield self._call()

    def _call(self) -> Call:
        rng = self._rng
        method = rng.choice(self._methods)
        self._wild = rng.choice(_WILD)
        data = self._message(method.input_type).SerializeToString()
        self._recent = [*self._recent[-50:], data]
        if rng.random() < 0.5:
            data = self._mutated(data)
        is_watch = method.name == "Watch"
        return Call(
            f"/{method.containing_service.full_name}/{method.name}",
            data,
            method.client_streaming,
            method.server_streaming,
            rng.choice((TIMEOUT_S, TIMEOUT_S, TIMEOUT_S, 0.5, 0.02)),
            rng.uniform(0, 0.5) if is_watch or rng.random() < 0.1 else None,
        )

    # Typed requests

    def _message(self, descriptor: Descriptor, depth: int = 0) -> Message:
        message = GetMessageClass(descriptor)()
        if isinstance(message, struct_pb2.Struct):
            message.update({"kwarg": self._json(depth)})
            return message
        for field in descriptor.fields:
            is_rare = field.name in _RARE and descriptor.full_name in _WITH_RARE
            if self._rng.random() < (0.02 if is_rare else 0.55):
                self._fill(message, field, depth)
        return message

    def _fill(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        rng = self._rng
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            for _ in range(rng.choice((1, 2, 3, 17))):
                getattr(message, field.name)[self._scalar(key)] = self._scalar(value)
        elif field.is_repeated:
            # Not within each other: a message has at most 2 GiB.
            is_many = not self._is_within_many and self._is_wild() and rng.random() < 0.2
            self._is_within_many |= is_many
            for _ in range(5000 if is_many else rng.choice((1, 2, 3, 17))):
                values = getattr(message, field.name)
                if field.message_type is not None:
                    values.add().CopyFrom(self._message(field.message_type, depth + 1))
                else:
                    values.append(self._scalar(field))
            self._is_within_many &= not is_many
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(self._message(field.message_type, depth + 1))
        else:
            setattr(message, field.name, self._scalar(field))

    def _scalar(self, field: FieldDescriptor) -> Any:
        rng = self._rng
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            if field.type == FieldDescriptor.TYPE_BYTES:
                return rng.randbytes(rng.choice((0, 1, 40)))
            return self._text(field.name)
        if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
            if self._is_wild() or field.name not in _USUAL:
                return rng.choice(_FLOATS)
            return rng.uniform(0.01, _USUAL[field.name])
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice((0, 1, 2, 99) if self._is_wild() else (0, 1, 2))
        return self._integer(field)

    def _text(self, name: str) -> str:
        rng = self._rng
        if self._is_wild():
            return rng.choice(_STRINGS)
        if name == "request_id":
            return f"fuzz-{rng.randrange(_NUM_IDS)}"
        if name in ("model", "name"):
            return self._model
        if name == "role":
            return rng.choice(("user", "assistant", "system"))
        return "".join(chr(rng.randrange(32, 127)) for _ in range(rng.randrange(1, 60)))

    def _integer(self, field: FieldDescriptor) -> int:
        rng = self._rng
        if not self._is_wild() and field.name in _USUAL:
            return rng.randint(field.name in ("n", "max_tokens"), int(_USUAL[field.name]))
        is_signed = field.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
        is_wide = field.cpp_type in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
        value = rng.choice(_INTEGERS) & (2 ** ((64 if is_wide else 32) - is_signed) - 1)
        return -value if is_signed and rng.random() < 0.3 else value

    def _is_wild(self) -> bool:
        return self._rng.random() < self._wild

    def _json(self, depth: int) -> Any:
        rng = self._rng
        if depth > 6 or rng.random() < 0.5:
            return rng.choice((None, True, 0, 1e308, "text", "x" * 1000))
        if rng.random() < 0.1:
            # Deeper than parsers of protocol buffers permit.
            value: Any = 0
            for _ in range(rng.choice((20, 200))):
                value = [value]
            return value
        if rng.random() < 0.5:
            return [self._json(depth + 1) for _ in range(rng.randrange(4))]
        return {str(index): self._json(depth + 1) for index in range(rng.randrange(4))}

    # Mutations

    def _mutated(self, data: bytes) -> bytes:
        mutations: Sequence[Callable[[bytes], bytes]] = (
            self._with_flipped_bits,
            self._truncated,
            self._with_random_bytes,
            self._with_a_tag,
            self._spliced,
            self._repeated,
        )
        for _ in range(self._rng.choice((1, 1, 2, 4))):
            data = self._rng.choice(mutations)(data)
        return data

    def _at(self, data: bytes) -> int:
        return self._rng.randrange(len(data) + 1)

    def _with_flipped_bits(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(min(len(data), self._rng.choice((1, 1, 3, 10)))):
            changed[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        return bytes(changed)

    def _truncated(self, data: bytes) -> bytes:
        return data[: self._at(data)]

    def _with_random_bytes(self, data: bytes) -> bytes:
        at = self._at(data)
        return data[:at] + self._rng.randbytes(self._rng.choice((1, 4, 300))) + data[at:]

    def _with_a_tag(self, data: bytes) -> bytes:
        at = self._at(data)
        return data[:at] + self._rng.choice(_TAGS) + data[at:]

    def _spliced(self, data: bytes) -> bytes:
        other = self._rng.choice(self._recent)
        return data[: self._at(data)] + other[self._at(other) :]

    def _repeated(self, data: bytes) -> bytes:
        """Many small fields: each takes far more memory than bytes."""
        times = self._rng.choice((2, 100, 100_000))
        return data[:20] * min(times, 2_000_000 // max(1, len(data[:20])))


class Fuzzer:
    """Makes calls, some at a time, and collects those with a forbidden status."""

    def __init__(self, target: str, num_at_once: int) -> None:
        options = [("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)]
        self._channel = grpc.aio.insecure_channel(target, options=options)
        self._free = asyncio.Semaphore(num_at_once)
        self.codes: Counter[str] = Counter()
        self.failed: list[Failed] = []

    async def run(self, calls: Iterator[Call]) -> None:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                await self._free.acquire()
                group.create_task(self._make(call))

    async def close(self) -> None:
        await self._channel.close()

    async def _make(self, call: Call) -> None:
        try:
            code, details = await self._end_of(call)
        finally:
            self._free.release()
        self.codes[code.name] += 1
        # The client's own words for a stream that ended before its first write.
        if code in FORBIDDEN and details != "Internal error from Core":
            self.failed.append(Failed(call, code, details))

    async def _end_of(self, call: Call) -> tuple[grpc.StatusCode, str]:
        """Make a call and read its responses to the end."""
        if call.request_streams:
            running: Any = self._channel.stream_stream(call.path)(
                iter([call.data]), timeout=call.timeout_s
            )
        elif call.response_streams:
            running = self._channel.unary_stream(call.path)(call.data, timeout=call.timeout_s)
        else:
            running = self._channel.unary_unary(call.path)(call.data, timeout=call.timeout_s)
        if call.cancel_after_s is not None:
            asyncio.get_running_loop().call_later(call.cancel_after_s, running.cancel)
        try:
            if call.request_streams or call.response_streams:
                async for _ in running:
                    pass
            else:
                await running
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass
        return await running.code(), await running.details()
