import pytest

from quire import LLM, QuireError, SamplingParams
from quire.launcher.service_settings import service_settings


@pytest.fixture
def llm(server):
    with LLM(target=server.target) as llm:
        yield llm


def test_several_prompts_of_both_kinds(llm):
    outputs = llm.generate(["one", [1, 2], "two"])
    assert [output.prompt for output in outputs] == ["one", None, "two"]
    assert outputs[1].prompt_token_ids == [1, 2]


@pytest.mark.parametrize("prompt", ["one", [1, 2]])
def test_a_single_prompt_gives_a_list_of_one(llm, prompt):
    assert len(llm.generate(prompt)) == 1


def test_without_prompts_there_are_no_outputs(llm):
    assert llm.generate([]) == []


def test_parameters_for_all_or_for_each(llm, server):
    llm.generate(["a", "b"], SamplingParams(seed=5))
    assert [r.sampling_params.seed for r in server.inference.requests] == [5, 5]
    llm.generate(["a", "b"], [SamplingParams(seed=1), SamplingParams(seed=2)])
    seeds = {r.text: r.sampling_params.seed for r in server.inference.requests[2:]}
    assert seeds == {"a": 1, "b": 2}


def test_n_completions_for_each_prompt(llm):
    first, second = llm.generate(["a", "b"], [SamplingParams(n=2), None])
    assert [completion.text for completion in first.outputs] == ["A", "AA"]
    assert [completion.text for completion in second.outputs] == ["B"]


def test_logprobs_for_each_prompt_that_asks(llm):
    first, second = llm.generate(["a", "b"], [SamplingParams(logprobs=1), None])
    assert [list(one) for one in first.outputs[0].logprobs] == [[1, 0], [2, 0]]
    assert second.outputs[0].logprobs == []
    [delta] = [d for d in llm.stream("a", SamplingParams(logprobs=0)) if d.text]
    assert [list(one) for one in delta.outputs[0].logprobs] == [[0]]


def test_a_priority_for_all_prompts(llm, server):
    llm.generate(["a", "b"], priority=-1)
    llm.chat([{"role": "user", "content": "Hi"}], priority=2)
    list(llm.stream("a", priority=3))
    assert [request.priority for request in server.inference.requests] == [-1, -1, 2, 3]


def test_parameters_must_match_the_prompts(llm):
    with pytest.raises(ValueError, match="1 sampling parameters for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()])


def test_chat_takes_one_conversation_or_several(llm, server):
    conversation = [{"role": "user", "content": "Hi"}]
    assert len(llm.chat(conversation)) == 1
    assert len(llm.chat([conversation, conversation])) == 2
    assert all(len(r.conversation.messages) == 1 for r in server.inference.requests)


def test_prompts_in_vllms_form(llm, server):
    outputs = llm.generate([{"prompt": "one"}, {"prompt_token_ids": [1, 2]}])
    assert [output.prompt for output in outputs] == ["one", None]
    assert outputs[1].prompt_token_ids == [1, 2]
    [output] = llm.generate({"prompt": "one"})
    assert output.outputs[0].text == "ONE"


@pytest.mark.parametrize("prompts", [{"text": "hello"}, b"hello", 5, None])
def test_an_invalid_prompt_is_refused(llm, server, prompts):
    with pytest.raises(TypeError, match="prompts: must be a text, token ids or a conversation"):
        llm.generate(prompts)
    assert server.inference.requests == []


@pytest.mark.parametrize(
    "messages", ["hi", ["hi"], [], [[]], [5, 6], {"role": "user", "content": "hi"}, None]
)
def test_an_invalid_conversation_is_refused(llm, server, messages):
    with pytest.raises(TypeError, match="messages: must be a conversation"):
        llm.chat(messages)
    assert server.inference.requests == []


@pytest.mark.parametrize("params", [{"max_tokens": 3}, 5, [{"max_tokens": 3}]])
def test_invalid_parameters_are_refused(llm, server, params):
    with pytest.raises(TypeError, match="sampling_params: must be SamplingParams"):
        llm.generate("a", params)
    assert server.inference.requests == []


def test_stream(llm):
    assert [delta.text for delta in llm.stream("a b")] == ["", "A", "B", ""]


def test_a_failing_prompt_raises(llm):
    with pytest.raises(QuireError, match="temperature"):
        llm.generate(["one", "bad"])


def test_the_model_of_a_running_server_is_named_in_requests(server):
    with LLM("other", target=server.target) as llm:
        llm.generate("one")
    assert server.inference.requests[0].model == "other"


def test_needs_a_model_or_a_target():
    with pytest.raises(ValueError, match="a model to start or the target"):
        LLM()


def test_a_wrong_type_of_the_stacks_arguments_is_named():
    with pytest.raises(TypeError, match=r"num_workers: must be an integer \(got '2'\)"):
        LLM("model", num_workers="2")
    with pytest.raises(TypeError, match=r"model: must be a path or an id \(got 5\)"):
        LLM(5)


@pytest.mark.parametrize(
    "setting",
    [
        {"block_size": 32},
        {"num_workers": 3},
        {"num_workers": 0},
        {"revision": "x"},
        {"verbose": True},
    ],
)
def test_a_running_server_cannot_be_configured(server, setting):
    with pytest.raises(
        ValueError, match=f"settings of a running server cannot be set: {next(iter(setting))}"
    ):
        LLM(target=server.target, **setting)


def test_settings_that_a_stack_sets_are_refused():
    """They had no effect."""
    of_worker = [one for one in service_settings() if one.service == "worker" and one.reserved]
    names = {one.name for one in of_worker} - {"model", "revision"}
    assert "listen" in names
    for name in names:
        with pytest.raises(ValueError, match=rf"{name}: is set by LLM itself \(got 'x'\)"):
            LLM("model", **{name: "x"})


def test_a_setting_that_is_none_is_not_set(server):
    LLM(target=server.target, block_size=None, revision=None).close()


def test_sampling_parameters_are_arguments_too(llm, server):
    outputs = llm.generate("hello", max_tokens=3, seed=7)
    assert [output.text for output in outputs] == [outputs[0].outputs[0].text]
    assert server.inference.requests[-1].sampling_params.max_tokens == 3
    llm.chat([{"role": "user", "content": "x"}], temperature=0)
    assert server.inference.requests[-1].sampling_params.HasField("temperature")
    list(llm.stream("hello", top_k=2))
    assert server.inference.requests[-1].sampling_params.top_k == 2
    with pytest.raises(TypeError, match="sampling_params is set, so max_tokens cannot be"):
        llm.generate("hello", SamplingParams(), max_tokens=3)
    with pytest.raises(TypeError, match="max_token: no such argument"):
        llm.generate("hello", max_token=3)


def test_a_conversation_is_streamed(llm, server):
    deltas = llm.stream_chat([{"role": "user", "content": "one two"}], max_tokens=3)
    assert "".join(delta.text for delta in deltas) == "ONETWO"
    [request] = server.inference.requests
    assert [message.content for message in request.conversation.messages] == ["one two"]
    assert request.sampling_params.max_tokens == 3
    for messages in ("one", [[{"role": "user", "content": "one"}]]):
        with pytest.raises(TypeError, match="messages: must be one conversation"):
            llm.stream_chat(messages)


def test_failures_take_the_places_of_their_outputs(llm):
    prompts = ["one", "bad", b"wrong", "two", [-1]]
    results = llm.generate(prompts, return_exceptions=True)
    assert [type(result).__name__ for result in results] == [
        *("RequestOutput", "InvalidArgumentError", "TypeError", "RequestOutput", "ValueError"),
    ]
    assert [results[at].text for at in (0, 3)] == ["ONE", "TWO"]
    assert results[1].field == "sampling_params.temperature"


def test_a_failure_beside_others_that_wait_does_not_cancel_them(llm, server):
    conversation = [{"role": "user", "content": "bad"}]
    results = llm.chat([conversation, [{"role": "user", "content": "a"}]], return_exceptions=True)
    assert isinstance(results[0], QuireError)
    assert results[1].text == "A"


def test_a_deadline_that_passes_before_a_retry_is_a_failure_of_its_prompt(llm):
    [result, other] = llm.generate(["busy", "one"], timeout_s=0.3, return_exceptions=True)
    assert isinstance(result, QuireError)
    assert other.text == "ONE"


def test_a_progress_bar_counts_prompts_and_tokens(llm, capsys):
    llm.generate(["a", "b"], use_tqdm=True)
    shown = capsys.readouterr().err
    assert "Processed prompts: 100%" in shown
    assert "2/2" in shown
    assert "4 tokens" in shown


def test_without_a_terminal_there_is_no_progress_bar(llm, capsys):
    llm.generate(["a", "b"])
    llm.generate(["a", "b"], use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_a_terminal_has_a_progress_bar_for_several_prompts(llm, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    llm.generate("a")
    assert capsys.readouterr().err == ""
    llm.chat([[{"role": "user", "content": text}] for text in ("a", "b")])
    assert "2/2" in capsys.readouterr().err


def test_a_function_makes_the_progress_bar(llm):
    class Bar:
        n = 0

        def update(self, n: int) -> None:
            self.n += n

        def set_postfix_str(self, *_, **__) -> None:
            """Nothing is drawn."""

        close = set_postfix_str

    made: list[Bar] = []

    def make(**options) -> Bar:
        assert options["total"] == 2
        made.append(Bar())
        return made[0]

    llm.generate(["a", "b"], use_tqdm=make)
    assert made[0].n == 2
