"""Threads that tenants share, and formats that many send."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from format_grammars import FIELD, SIZE, TOKENIZER, of_schema
from waiting import until

from gateway_svc.structured import compiler as compiler_module
from gateway_svc.structured.compiler import StructuredOutputCompiler
from gateway_svc.structured.fair_threads import FairThreads
from quire.service.errors import RequestError


async def test_tenants_are_served_round_robin() -> None:
    """Without calls that were cancelled, and not before the work of those has ended."""
    with ThreadPoolExecutor(1) as executor:
        threads, ran = FairThreads(executor, 1), list[str]()
        first_may_end = threading.Event()

        async def call(name: str) -> None:
            async with threads.hold(name[0]) as thread:
                await thread.run(first_may_end.wait if name == "a0" else lambda: None)
                ran.append(name)

        names = ("a0", "a1", "a2", "a3", "b0", "b1", "c0")
        calls = {name: asyncio.create_task(call(name)) for name in names}
        await asyncio.sleep(0)
        for name in ("a0", "a2", "b0"):
            calls[name].cancel()
        await until(lambda: calls["a0"].done(), "the end of a cancelled call")
        assert ran == []
        first_may_end.set()
        await asyncio.gather(*calls.values(), return_exceptions=True)
        assert ran == ["a1", "c0", "b1", "a3"]
        calls["a0"] = asyncio.create_task(call("a4"))
        await calls["a0"]
        assert ran[-1] == "a4"


async def test_a_format_of_many_calls_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So is one that is refused, for a while and for each field."""
    checked: list[str] = []
    compile_schema = compiler_module._compile_schema

    def counted(vocabulary: object, field: str, text: str) -> object:
        checked.append(field)
        return compile_schema(vocabulary, field, text)  # type: ignore[arg-type]

    monkeypatch.setattr(compiler_module, "_compile_schema", counted)
    monkeypatch.setattr(compiler_module, "_NUM_THREADS", 1)
    compiler = StructuredOutputCompiler(TOKENIZER, SIZE)
    served, refused = of_schema({"type": "integer"}), of_schema({"not": {}})
    found = await asyncio.gather(*(compiler.compile(FIELD, served, name) for name in "abcab"))
    assert len({one.definition for one in found}) == len(checked) == 1

    async def message(field: str) -> str:
        with pytest.raises(RequestError) as caught:
            await compiler.compile(field, refused)
        return caught.value.message

    assert len({await message(FIELD) for _ in range(3)}) == 1
    assert len(checked) == 2
    assert (await message("other")).startswith("other.json_schema: ")
    assert len(checked) == 3
    monkeypatch.setattr(compiler_module, "_MAX_REFUSALS", 0)
    await message(FIELD)
    assert len(checked) == 4
    monkeypatch.setattr(compiler_module, "_REFUSED_S", 0)
    await message(FIELD)
    assert len(checked) == 5
