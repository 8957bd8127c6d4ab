"""What a GPU's host does for a step, on a device that has no data: it may ask it for nothing."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from dataless_device import CHANGES, FUSED, PRODUCTS, Crossings, dataless, idle_kernels
from host_device import HostCapturer, HostStreams
from tiny_models import FAMILIES, VOCAB_SIZE, llama, save_model
from worker_driver import Sampling, Sequence, admit, append, schedule, worker_settings

from kernels.dispatch import interprets_triton
from quire.internal.v1 import worker_pb2
from quire.internal.v1.logits_pb2 import LogitsParams
from worker_svc.gpu.device_forward import DeviceForward
from worker_svc.loading.runner_loading import load_runner
from worker_svc.plan.plans import Plan, plan_from_proto
from worker_svc.runner import prompt_slices
from worker_svc.runner.step_runner import LoadedRunner

pytest.importorskip("kernels.gpu.attention", reason="there are no Triton kernels")


# Parts of a model are compared before they are replaced, which takes data: where Triton cannot
# interpret its kernels on the processor, nothing is replaced.
_KERNELS = "triton" if interprets_triton() else "torch"
# By family: the kernels that its layers do not launch.
_UNUSED = {
    "llama": {"rope_kernel"},
    "qwen3": {"rope_kernel"},
    "gemma2": {"qk_norm_rope_kernel"},
    "gpt2": FUSED,
}


def load(folder: Path) -> LoadedRunner:
    return load_runner(worker_settings(folder, device="cpu", kernels=_KERNELS, max_num_seqs=20))


def plans() -> list[Plan]:
    """Prompts, decoding rows, both at once, nothing; log-probabilities; blocks that are added."""
    prompts, decoding, mixed, nothing = (worker_pb2.BatchPlan(step=i) for i in range(1, 5))
    for row in range(3):
        sampling = Sampling(num_logprobs=2 * row, top_k=row, temperature=0.5 * row)
        admit(prompts, Sequence(row, [5, 6, 7], 3, 0, [1 + 3 * row], sampling))
        schedule(prompts, row, 3)
        append(decoding, row, [2 + 3 * row])
        schedule(decoding, row, 1)
        schedule(mixed, row, 1)
    admit(mixed, Sequence(3, [1, 2, 3, 4, 5], 5, 0, [30, 31]))
    schedule(mixed, 3, 4)
    return [plan_from_proto(each) for each in (prompts, decoding, mixed, nothing)]


def plan_of_a_prompt(num_tokens: int, num_prompt_logprobs: int) -> Plan:
    plan = worker_pb2.BatchPlan(step=5)
    sampling = Sampling(num_prompt_logprobs=num_prompt_logprobs)
    blocks = [*range(50, 60)]
    admit(plan, Sequence(5, [1] * num_tokens, num_tokens, 0, blocks, sampling))
    schedule(plan, 5, num_tokens)
    return plan_from_proto(plan)


@pytest.mark.parametrize("capturer", [None, HostCapturer], ids=["eager", "graphs"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_launch_does_not_wait_for_the_device(
    family: str,
    capturer: Callable[[], HostCapturer] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = load(save_model(FAMILIES[family](), tmp_path))
    kernels = idle_kernels(monkeypatch)
    runner = dataless(loaded, capturer and capturer())
    before = {name: kernel.num_launches for name, kernel in kernels.items()}
    streams = runner._streams
    assert isinstance(streams, HostStreams)
    num_synchronized = streams.num_synchronized
    with Crossings() as crossings:
        launched = [runner.launch(plan) for plan in plans()]
    assert [len(step.sampling) for step in launched] == [3, 3, 3, 0]
    idle = {name for name, kernel in kernels.items() if kernel.num_launches == before[name]}
    assert streams.num_synchronized == num_synchronized
    # All of a step's inputs at once.
    assert crossings.found == ["copy_"] * len(launched)
    # No sequence is long enough to be cut, and no row has a logits processor.
    unused = _UNUSED[family] if interprets_triton() else FUSED
    assert idle == {"merge_partitions_kernel", *CHANGES, *PRODUCTS, *unused}


@pytest.mark.skipif(not interprets_triton(), reason="Triton's kernels are not interpreted")
@pytest.mark.parametrize("quantization", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
def test_products_of_integers_do_not_wait_for_the_device(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An embedding in 8 bits among them: it is tied to the head."""
    config = llama()
    config.tie_word_embeddings = True
    folder = save_model(config, tmp_path)
    settings = worker_settings(
        folder, device="cpu", kernels="triton", max_num_seqs=20, quantization=quantization
    )
    loaded = load_runner(settings)
    kernels = idle_kernels(monkeypatch)
    runner = dataless(loaded, HostCapturer())
    before = {name: kernels[name].num_launches for name in PRODUCTS}
    variants = {name: set(kernels[name].variants) for name in PRODUCTS}
    steps = [*plans(), plan_of_a_prompt(40, num_prompt_logprobs=2)]
    with Crossings() as crossings:
        for plan in steps:
            runner.launch(plan)
    assert crossings.found == ["copy_"] * len(steps)
    # Of layers and of the head, nothing is compiled while requests wait.
    assert {name: kernels[name].variants for name in PRODUCTS} == variants
    launched = {name for name in PRODUCTS if kernels[name].num_launches > before[name]}
    # No weight has as many inputs as a split.
    of_layers = {"tiled_linear_kernel"} if quantization == "int4" else set()
    assert launched == {"_round_rows_kernel", "int8_linear_kernel", *of_layers}


def test_logits_processors_do_not_wait_for_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that keep their places bring no numbers to the device after their first step."""
    loaded = load(save_model(llama(), tmp_path))
    kernels = idle_kernels(monkeypatch)
    runner = dataless(loaded, HostCapturer())
    before = {name: kernel.num_launches for name, kernel in kernels.items()}
    params = LogitsParams(
        presence_penalty=1.0,
        min_tokens=4,
        stop_token_ids=[1],
        bias_token_ids=[2],
        biases=[1.0],
        allowed_token_ids=range(9),
        bad_words_token_ids=[1, 2, 3],
        bad_words_lengths=[1, 2],
        processed_logprobs=True,
        typical_p=0.5,
    )
    messages = [worker_pb2.BatchPlan(step=step) for step in range(1, 4)]
    for row in range(3):
        sampling = Sampling(num_logprobs=2 * row, temperature=0.5)
        admit(messages[0], Sequence(row, [5, 6, 7], 2, 0, [1 + 3 * row, 2 + 3 * row], sampling))
        messages[0].admissions.logits_params.append(params.SerializeToString() if row else b"")
        for message in messages:
            schedule(message, row, 3 if message is messages[0] else 1)
    num_crossings = []
    for message in messages:
        with Crossings() as crossings:
            assert len(runner.launch(plan_from_proto(message)).sampling) == 3
        num_crossings.append(len(crossings.found))
    assert num_crossings[0] > num_crossings[1] == num_crossings[2] == 1
    for name in CHANGES:
        assert kernels[name].num_launches == before[name] + len(messages)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_log_probabilities_of_a_prompt_do_not_wait_for_the_device(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In slices, and also of a chunk of one token per row, which would replay a graph."""
    monkeypatch.setattr(prompt_slices, "_SLICE_BYTES", 3 * 4 * VOCAB_SIZE)
    loaded = load(save_model(FAMILIES[family](), tmp_path))
    idle_kernels(monkeypatch)
    runner = dataless(loaded, HostCapturer())
    launched = []
    with Crossings() as crossings:
        for step, count in enumerate((7, 1, 3), 1):
            plan = worker_pb2.BatchPlan(epoch=1, step=step)
            if step == 1:
                sampling = Sampling(num_prompt_logprobs=3)
                admit(plan, Sequence(0, [5] * 11, 11, 0, [1, 2, 3], sampling))
            schedule(plan, 0, count)
            launched.append(runner.launch(plan_from_proto(plan)))
    assert [step.targets.num_tokens.tolist() for step in launched] == [[7], [1], [2]]
    assert crossings.found == ["copy_"] * len(launched)


def _number(tensor: torch.Tensor) -> object:
    return tensor.sum().item()


def _truth(tensor: torch.Tensor) -> object:
    return bool(tensor.sum())


def _list(tensor: torch.Tensor) -> object:
    return tensor.tolist()


def _some(tensor: torch.Tensor) -> object:
    return tensor[tensor > 0]


def _mixed(tensor: torch.Tensor) -> object:
    return tensor + torch.ones(len(tensor))


@pytest.mark.parametrize(
    "bring",
    [
        lambda there: there.new_tensor([1, 2]),
        lambda there: torch.tensor([1, 2], device=there.device),
        lambda there: torch.asarray([1, 2], device=there.device),
        lambda there: there[[0, 1]],
        lambda there: there[np.array([0, 1])],
        lambda there: there.view(1, 2)[:, torch.tensor([0, 1])],
        lambda there: torch.ones(2).to(there.device),
        lambda there: there.copy_(torch.ones(2)),
    ],
)
def test_copies_to_the_device_are_found(bring: Callable[[torch.Tensor], object]) -> None:
    with torch.inference_mode(), Crossings() as crossings:
        bring(torch.empty(2, device="meta"))
    assert len(crossings.found) == 1


@pytest.mark.parametrize("ask", [_number, _truth, _list, _some, _mixed])
def test_reading_from_the_device_fails(
    ask: Callable[[torch.Tensor], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above can fail."""
    loaded = load(save_model(llama(), tmp_path))
    idle_kernels(monkeypatch)
    runner = dataless(loaded)
    original = DeviceForward.write_last_tokens

    def asking(self: DeviceForward, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        ask(token_ids)
        original(self, rows, token_ids)

    monkeypatch.setattr(DeviceForward, "write_last_tokens", asking)
    with pytest.raises((RuntimeError, NotImplementedError)):
        runner.launch(plans()[0])
