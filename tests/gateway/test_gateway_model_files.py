"""Reading model folders and rendering chat templates."""

import gc
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from gateway_svc.text import model_files
from gateway_svc.text.chat_template import ChatTemplate, TemplateError
from gateway_svc.text.detokenizer import Detokenizer
from gateway_svc.text.model_files import ModelFilesError
from gateway_svc.text.served_model import Model
from quire.v1.conversation_pb2 import TOOL_CHOICE_MODE_NONE, Conversation, Message, Tool


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "copy"))


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def test_a_folder_is_read(folder: Path) -> None:
    files = model_files.load(str(folder), None)
    assert (files.vocab_size, files.max_positions) == (files.tokenizer.get_vocab_size(), 4096)
    assert files.eos_token_ids == (files.tokenizer.token_to_id("</s>"),)
    assert files.chat_template is not None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"vocab_size": 500, "n_positions": 128, "eos_token_id": 7}, (500, 128, (7,))),
        (
            {
                "text_config": {
                    "vocab_size": 9,
                    "max_position_embeddings": 5,
                    "eos_token_id": [1, 2],
                }
            },
            (9, 5, (1, 2)),
        ),
        ({"vocab_size": 3}, (3, None, ())),
    ],
)
def test_numbers_from_every_place_in_a_config(
    folder: Path, config: dict[str, Any], expected: tuple[int, int | None, tuple[int, ...]]
) -> None:
    (folder / "generation_config.json").unlink()
    write(folder / "tokenizer_config.json", {})
    write(folder / "config.json", config)
    files = model_files.load(str(folder), None)
    assert (files.vocab_size, files.max_positions, files.eos_token_ids) == expected


def test_an_end_of_sequence_id_may_be_a_number(folder: Path) -> None:
    write(folder / "generation_config.json", {"eos_token_id": 0})
    assert model_files.load(str(folder), None).eos_token_ids == (0,)


def test_end_of_sequence_ids_outside_the_vocabulary_are_left_out(folder: Path) -> None:
    write(folder / "config.json", {"vocab_size": 400})
    write(folder / "generation_config.json", {"eos_token_id": [-1, 1, 399, 400]})
    assert model_files.load(str(folder), None).eos_token_ids == (1, 399)


@pytest.mark.parametrize(
    ("config", "eos_token", "expected"),
    [
        ({}, "</s>", "</s>"),
        ({}, {"content": "</s>"}, "</s>"),
        ({"eos_token_id": 0}, "</s>", "<s>"),
        ({}, "no token", None),
    ],
)
def test_the_tokenizer_names_the_end_of_sequence_if_the_configs_do_not(
    folder: Path, config: dict[str, Any], eos_token: object, expected: str | None
) -> None:
    (folder / "generation_config.json").unlink()
    write(folder / "config.json", {"vocab_size": 400, **config})
    write(folder / "tokenizer_config.json", {"eos_token": eos_token})
    files = model_files.load(str(folder), None)
    tokens = [files.tokenizer.id_to_token(token_id) for token_id in files.eos_token_ids]
    assert tokens == ([] if expected is None else [expected])


@pytest.mark.parametrize("named", [False, True])
def test_a_template_in_the_tokenizer_config(folder: Path, named: bool) -> None:
    source = "{{ eos_token }}{{ messages[0].content }}"
    (folder / "chat_template.jinja").unlink()
    templates = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": source}]
    config = {"eos_token": "</s>", "chat_template": templates if named else source}
    write(folder / "tokenizer_config.json", config)
    template = model_files.load(str(folder), None).chat_template
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}], True) == "</s>hi"


@pytest.mark.parametrize("in_files", [False, True])
async def test_conversations_with_tools_have_the_template_for_them(
    folder: Path, in_files: bool
) -> None:
    sources = {"default": "plain", "tool_use": "{{ tools | length }} <tool_call>", "rag": "{{"}
    if in_files:
        others = folder / "additional_chat_templates"
        others.mkdir()
        for name, source in sources.items():
            path = folder / "chat_template.jinja"
            (path if name == "default" else others / f"{name}.jinja").write_text(source)
    else:
        (folder / "chat_template.jinja").unlink()
        entries = [{"name": name, "template": source} for name, source in sources.items()]
        write(folder / "tokenizer_config.json", {"chat_template": entries})
    with ThreadPoolExecutor(1) as threads:
        model = Model.from_files("tools", model_files.load(str(folder), None), threads)
        conversation = Conversation(messages=[Message(role="user")], tools=[Tool(name="f")])
        assert await model.render(conversation) == "1 <tool_call>"
        conversation.tool_choice.mode = TOOL_CHOICE_MODE_NONE
        assert await model.render(conversation) == "plain"
    assert model.formats.tools == "hermes"


def test_a_slow_tokenizer_is_refused_by_name(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"")
    write(folder / "tokenizer_config.json", {"tokenizer_class": "SlowTokenizer"})
    with pytest.raises(ModelFilesError, match=r"SlowTokenizer .* slow form \(tokenizer.model\)"):
        model_files.load(str(folder), None)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_missing_and_broken_files_are_named(folder: Path, name: str) -> None:
    (folder / name).write_text("{")
    with pytest.raises(ModelFilesError, match=str(folder)):
        model_files.load(str(folder), None)
    (folder / name).unlink()
    with pytest.raises(ModelFilesError, match=name):
        model_files.load(str(folder), None)


def test_paths_that_are_no_folders(folder: Path) -> None:
    for path in ("./nowhere", "/nowhere", "~/nowhere", "~no-such-user/nowhere"):
        with pytest.raises(ModelFilesError, match=f"^{path}: no such folder$"):
            model_files.load(path, None)
    file = folder / "config.json"
    with pytest.raises(ModelFilesError, match=f"{file}: is a file; give the folder that contains"):
        model_files.load(str(file), None)


def test_a_folder_below_the_users_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert model_files.load(f"~/{folder.name}", None).chat_template is not None


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}",
            "a\n",
        ),
        ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{% set n = namespace(self=1) %}{% set n.b = 2 %}{{ n.self + n.b }}", "3"),
        ("{{ dict([('a', 1)], b=2) }}{{ dict.fromkeys('a') }}", "{'a': 1, 'b': 2}{'a': None}"),
        ("{{ tools is none }} {{ strftime_now('%Y') | length }}", "True 4"),
    ],
)
def test_templates_are_rendered_as_in_transformers(source: str, expected: str) -> None:
    assert ChatTemplate(source, {}).render([{"role": "a", "content": "hi"}], True) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ 1 + 'a' }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].x.y }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ namespace(__call__=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a' * 10 ** 17 }}",
        # Half of a surrogate pair, which no tokenizer reads.
        "{{ '\\ud83d' }}",
    ],
)
def test_a_failing_template_raises_template_error(source: str) -> None:
    # One that recurses leaves no stack to finalizers of what other tests have left.
    gc.collect()
    with pytest.raises(TemplateError, match=r".+"):
        ChatTemplate(source, {}).render([{"role": "a", "content": "hi"}], True)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages | map(attribute='content') | list | tojson }}", '["Be\\n", "hi"]'),
        ("{{ messages[0].content | upper }}{{ messages[1].content }}", "BE\nhi"),
        ("{{ messages[-1].content }}", "Be\n\n\nhi"),
    ],
)
def test_system_messages_stay_where_a_template_renders_them(source: str, expected: str) -> None:
    messages = [{"role": "system", "content": "Be\n"}, {"role": "user", "content": "hi"}]
    assert ChatTemplate(source, {}).render(messages, True) == expected


@pytest.mark.parametrize("has_system", [False, True])
def test_a_template_that_renders_parts_gets_texts_as_parts(has_system: bool) -> None:
    """As SmolVLM's, which renders nothing of a text."""
    roles = "" if has_system else " if message.role != 'system'"
    source = (
        "{% for message in messages" + roles + " %}{{ message.role }}:"
        "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
        "{% endfor %};{% endfor %}"
    )
    messages = [
        {"role": "system", "content": "Be"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": ""},
    ]
    expected = "system:Be;user:hi;" if has_system else "user:Be\n\nhi;"
    assert ChatTemplate(source, {}).render(messages, True) == expected + "assistant:;"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if message.content is not none %}{{ message.content }}{% endif %}call", "call"),
        ("{{ message['content'] is none }}", "True"),
        ("{{ message['content'] == None }}", "True"),
        # As gpt-oss' and Phi 4's, which compare something else with none.
        (
            "{% set last = namespace(name=none) %}{{ last.name is none }}"
            "{{ '<|channel|>' in message.content }}",
            "TrueFalse",
        ),
        ("{{ message.tools is not none }}{{ '<|a|>' + message.content }}", "True<|a|>"),
        ("{{ message.reasoning_content is none }}{{ '<a>' + message.content }}", "False<a>"),
    ],
)
def test_a_call_without_text_has_the_content_that_the_template_expects(
    source: str, expected: str
) -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": {}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    template = ChatTemplate("{% for message in messages %}" + source + "{% endfor %}", {})
    assert template.render(messages, True) == expected


def test_system_messages_stay_where_a_template_needs_tools() -> None:
    """As Hermes' template `tool_use`, which is for conversations with tools only."""
    source = (
        "{% for tool in tools %}{{ tool.function.name }}{{ tool.function.description }}"
        "{{ tool.function.parameters.properties | length }};{% endfor %}"
        "{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}"
    )
    messages = [{"role": "system", "content": "Be"}, {"role": "user", "content": "hi"}]
    function = {"name": "f", "description": "", "parameters": {"properties": {}}}
    tools = [{"type": "function", "function": function}]
    rendered = ChatTemplate(source, {}).render(messages, True, tools=tools)
    assert rendered == "f0;system:Be;user:hi;"


async def test_the_keys_of_a_templates_variables_are_sorted(folder: Path) -> None:
    """Maps of protobuf have an order of their own in each process."""
    (folder / "chat_template.jinja").write_text("{{ options | tojson }}")
    values = {key: at for at, key in enumerate("hbgacfed")}
    conversation = Conversation(messages=[Message(role="user")])
    conversation.chat_template_kwargs.update({"options": [values]})
    with ThreadPoolExecutor(1) as threads:
        model = Model.from_files("order", model_files.load(str(folder), None), threads)
        assert await model.render(conversation) == json.dumps([values], sort_keys=True)


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": "<a>", "pad_token": {"content": "<b>"}},
        {
            "eos_token": "<c>",
            "added_tokens_decoder": {
                "400": {"content": "<a>", "special": True},
                "401": {"content": "<b>", "special": True},
                "402": {"content": "<c>", "special": False},
            },
        },
    ],
)
async def test_special_tokens_are_those_of_the_config_too(
    folder: Path, config: dict[str, Any]
) -> None:
    """As in transformers. Many a tokenizer's file has `<|im_end|>` as a token like others."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(token, special=False) for token in ("<a>", "<b>", "<c>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    write(folder / "tokenizer_config.json", {"unk_token": "a", **config})
    with ThreadPoolExecutor(1) as threads:
        model = Model.from_files("special", model_files.load(str(folder), None), threads)
        token_ids = await model.encode("cat<a>s<b><c><s>", False)
        assert await model.decode(token_ids, skip_special_tokens=True) == "cats<c>"
        assert await model.decode(token_ids, skip_special_tokens=False) == "cat<a>s<b><c><s>"
    detokenizer = Detokenizer(model.vocabulary)
    assert "".join(detokenizer.push([id_]) for id_ in token_ids) == "cats<c>"
