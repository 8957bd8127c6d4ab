"""What a worker writes down, and what it makes of it when asked."""

import json
import math
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf import proto
from sim_driver import SMALL
from worker_driver import LaneClient, Sampling, Sequence, admit, append, schedule, served

from quire.internal.v1 import worker_pb2
from quire.internal.v1.logits_pb2 import Grammar, LogitsParams
from worker_svc.plan.logits_params import LogitsParams as PlanLogitsParams
from worker_svc.plan.plans import (
    Plan,
    PlanError,
    StepOutput,
    StepTimes,
    plan_from_proto,
    plan_to_proto,
)
from worker_svc.runner.step_runner import Callback, ReadyOutput, no_op
from worker_svc.service.recorder import Recorder, RecordingRunner
from worker_svc.sim.runner import SimRunner
from worker_svc.sim.runner_loading import loaded_runner

_EXAMPLE = json.loads((Path(__file__).parent / "prepare_inputs.json").read_text())


def entries(path: Path) -> list[worker_pb2.Recording]:
    found = []
    with path.open("rb") as file:
        while (entry := proto.parse_length_prefixed(worker_pb2.Recording, file)) is not None:
            found.append(entry)
    return found


def first_plan() -> worker_pb2.BatchPlan:
    plan = worker_pb2.BatchPlan()
    admit(plan, Sequence(0, [1, 2, 3], 3, block_ids=[1], sampling=Sampling(seed=9)))
    schedule(plan, 0, 3)
    return plan


def every_logits_param() -> LogitsParams:
    params = LogitsParams(
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        repetition_penalty=1.5,
        min_tokens=2,
        stop_token_ids=[1, 2],
        bias_token_ids=[3, 4],
        biases=[0.5, -100],
        allowed_token_ids=[5, 6, 7],
        bad_words_token_ids=[1, 2, 3],
        bad_words_lengths=[1, 2],
        processed_logprobs=True,
        typical_p=0.75,
        grammar=Grammar(
            definition="start: /a+/", begins_after_token_ids=[8, 9], field="x", principal="y"
        ),
    )
    params.processor_args.update({"mine": {"strength": 2.0, "names": ["a", None]}})
    assert {field.name for field, _ in params.ListFields()} == {
        field.name for field in LogitsParams.DESCRIPTOR.fields
    }
    return params


def test_arguments_of_processors_may_have_any_number() -> None:
    """They are no JSON then: it is for the row's processors, and not for the plan, to fail."""
    message = LogitsParams()
    message.processor_args.update({"mine": [math.inf, {"a": math.nan}, True, None, "x"]})
    message.processor_args.fields["empty"].SetInParent()
    read = PlanLogitsParams.from_bytes(message.SerializeToString())
    assert read.processor_args == {
        "mine": [math.inf, {"a": pytest.approx(math.nan, nan_ok=True)}, True, None, "x"],
        "empty": None,
    }


def test_a_plan_survives_the_way_there_and_back() -> None:
    message = worker_pb2.BatchPlan(
        epoch=3,
        step=8,
        released_rows=[1, 2],
        swap_outs=worker_pb2.BlockMoves(sources=[4], destinations=[0]),
        copies=worker_pb2.BlockMoves(sources=[1, 2], destinations=[2, 1]),
    )
    sampling = Sampling(
        temperature=0.5, top_k=3, top_p=0.25, min_p=0.5, seed=2**64 - 1, num_logprobs=2
    )
    admit(message, Sequence(2, [5, 6, 7], 2, 1, [9, 8], sampling))
    admit(message, Sequence(1, [5], 1, 0, [7]))
    params = every_logits_param().SerializeToString(deterministic=True)
    message.admissions.logits_params.extend([b"", params])
    message.admissions.rows_without_drafts.append(1)
    append(message, 3, [11, 12])
    schedule(message, 2, 1)
    assert plan_to_proto(plan_from_proto(message)) == message


async def test_plans_and_results_in_the_order_they_were_run(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "steps")
    loaded = loaded_runner(SimRunner(SMALL))
    recorded = replace(loaded, runner=RecordingRunner(loaded.runner, recorder))
    async with served(recorded) as worker:
        recorder.put(worker.servicer.hello())
        lane = LaneClient(worker.stub)
        hello = await lane.open()
        result = await lane.run(first_plan())
        await lane.send(worker_pb2.BatchPlan(released_rows=[3]))
        assert await lane.ended() is grpc.StatusCode.INTERNAL
        again = LaneClient(worker.stub, epoch=2)
        await again.open()
        again.step = 5
        await again.run(worker_pb2.BatchPlan())
        await again.call.done_writing()
        assert await again.ended() is grpc.StatusCode.OK
    recorder.close()
    found = entries(tmp_path / "steps")
    kinds = ["hello", "plan", "result", "plan", "rows_cleared", "plan", "result", "rows_cleared"]
    assert [entry.WhichOneof("entry") for entry in found] == kinds
    assert (found[0].hello, found[2].result) == (hello, result)
    assert found[1].plan.admissions == first_plan().admissions
    assert [(entry.plan.epoch, entry.plan.step) for entry in (found[3], found[5])] == [
        (1, 2),
        (2, 6),
    ]


class Steps:
    """Launched ones, as a runner would give them; what is no step cannot be launched."""

    last_finished_step = 0

    def launch(self, plan: Plan, before_blocking: Callback = no_op) -> ReadyOutput[StepOutput]:
        if not plan.step:
            raise PlanError("no step")
        times = StepTimes()
        return ReadyOutput(StepOutput([plan.step], [7], times))

    def clear(self) -> None:
        pass


def test_results_follow_their_plans_in_the_recording(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "steps")
    runner = RecordingRunner(Steps(), recorder)
    messages = [worker_pb2.BatchPlan(epoch=1, step=step) for step in (1, 2, 0)]
    launched = [runner.launch(plan_from_proto(message)) for message in messages]
    for step in launched[:2]:
        step.output()
    with pytest.raises(PlanError, match="no step"):
        launched[2].output()
    recorder.close()
    found = entries(tmp_path / "steps")
    kinds = [entry.WhichOneof("entry") for entry in found]
    assert kinds == ["plan", "result", "plan", "result", "plan"]
    assert [entry.result.step for entry in found[1:4:2]] == [1, 2]


def test_a_full_disk_ends_the_recording_and_nothing_else() -> None:
    recorder = Recorder(Path("/dev/full"))
    runner = RecordingRunner(SimRunner(SMALL), recorder)
    for step in (1, 2, 3):
        message = worker_pb2.BatchPlan(epoch=1, step=step)
        runner.launch(plan_from_proto(message)).output()
    recorder.close()
    assert runner.last_finished_step == 3


def test_a_disk_that_hangs_keeps_no_worker_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_svc.service.recorder._CLOSE_S", 0.05)
    reader, writer = os.pipe()
    recorder = Recorder(Path(f"/proc/self/fd/{writer}"))
    # Three are more than a pipe holds, and 5,000 more than may be queued.
    entry = worker_pb2.Hello(kv_cache_dtype=40_000 * "a")
    for num_entries in (3, 5000):
        for _ in range(num_entries):
            recorder.put(entry)
        recorder.close()
        assert recorder._thread.is_alive()
    os.close(reader)
    os.close(writer)


def test_a_place_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Recorder(tmp_path / "nowhere" / "steps")


def test_two_workers_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    recorder = Recorder(path)
    recorder.put(worker_pb2.Hello(incarnation=1))
    with pytest.raises(BlockingIOError, match="another worker"):
        Recorder(path)
    recorder.close()
    assert path.stat().st_size
    # The next life of a worker starts anew.
    Recorder(path).close()
    assert not path.stat().st_size


async def test_the_worked_example_is_explained() -> None:
    hello = worker_pb2.Hello(
        block_size=_EXAMPLE["block_size"],
        max_model_len=_EXAMPLE["max_model_len"],
        max_num_batched_tokens=_EXAMPLE["max_num_batched_tokens"],
        max_num_seqs=3,
        num_blocks=9,
    )
    first, second = _EXAMPLE["steps"]
    one, two = worker_pb2.BatchPlan(step=1), worker_pb2.BatchPlan(step=2)
    for row, length in enumerate(_EXAMPLE["prompts"]):
        blocks = np.array(first["block_table"][row])
        tokens = second["token_table"][row][:length]
        admit(one, Sequence(row, tokens, length, 0, blocks[blocks > 0].tolist()))
        schedule(one, row, first["num_scheduled_tokens"][row])
        schedule(two, row, second["num_scheduled_tokens"][row])
    append(two, 1, [7])
    append(two, 2, [8])
    sampled = worker_pb2.StepResult(sampled_rows=[0, 1], sampled_token_ids=[103, 202])
    entries = [
        worker_pb2.Recording(hello=hello),
        worker_pb2.Recording(plan=one),
        worker_pb2.Recording(result=sampled),
        worker_pb2.Recording(plan=two),
    ]
    async with served(loaded_runner(SimRunner(SMALL))) as worker:
        for step, number in ((first, 2), (second, 4)):
            response = (await worker.stub.Explain(_all(entries[:number]))).step
            for name, expected in step["expected"].items():
                if isinstance(expected, list) and hasattr(response, name):
                    assert list(getattr(response, name)) == expected, name
            assert list(response.num_computed_tokens) == step["num_computed_tokens"]
        assert list(response.token_ids) == [100, 101, 102, 103, 200, 201, 202, *range(300, 308)]
        assert (list(response.block_ids), list(response.num_blocks)) == (
            [1, 2, 3, 7, 4, 5, 6, 8],
            [2, 2, 4],
        )


def geometry(**changed: int) -> worker_pb2.Recording:
    sizes = {"block_size": 4, "max_num_seqs": 2, "max_model_len": 8, "num_blocks": 9}
    return worker_pb2.Recording(hello=worker_pb2.Hello(**{**sizes, **changed}))


async def _all(
    entries: list[worker_pb2.Recording],
) -> AsyncIterator[worker_pb2.ExplainRequest]:
    for entry in entries:
        yield worker_pb2.ExplainRequest(entry=entry)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], "no plan"),
        ([worker_pb2.Recording(plan=worker_pb2.BatchPlan())], "begins with `hello`"),
        ([worker_pb2.Recording(hello=worker_pb2.Hello())], "geometry"),
        ([geometry(max_num_batched_tokens=2**32 - 1)], "geometry"),
        ([geometry(max_num_seqs=2**32 - 1, max_model_len=0)], "geometry"),
    ],
)
async def test_invalid_recordings_cannot_be_explained(
    entries: list[worker_pb2.Recording], words: str
) -> None:
    async with served(loaded_runner(SimRunner(SMALL))) as worker:
        with pytest.raises(grpc.aio.AioRpcError, match=words) as refused:
            await worker.stub.Explain(_all(entries))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
