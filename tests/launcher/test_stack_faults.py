"""Stacks whose processes are killed."""

import pytest
from process_waiting import wait_until
from tiny_models import VOCAB_SIZE, llama, save_model
from tiny_tokenizer import save_tokenizer

from quire import Client, LaunchError, LocalStack, SamplingParams
from quire.demo.faults import busiest_worker

_SIM = {"QUIRE_WORKER_ENGINE": "sim", "QUIRE_WORKER_SIM_STEP_MS": "10"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = save_model(llama(), tmp_path_factory.mktemp("llama"))
    save_tokenizer(folder, VOCAB_SIZE)
    return str(folder)


@pytest.mark.slow
def test_a_killed_process_is_restarted_at_its_address(model):
    ends: list[LaunchError] = []
    stack = LocalStack(
        model,
        num_workers=2,
        num_gateways=2,
        redis_appendonly=True,
        settings=_SIM,
        restart=True,
        on_end=ends.append,
    )
    with pytest.raises(LaunchError, match="not running"):
        stack.processes("worker")
    with stack:
        gateways, workers = stack.processes("gateway"), stack.processes("worker")
        assert [p.name for p in gateways] == ["gateway-0", "gateway-1"]
        assert [p.name for p in stack.processes("scheduler")] == ["scheduler"]
        assert [p.name for p in workers] == ["worker-0", "worker-1"]
        assert stack.pids == [p.pid for p in (*gateways, *stack.processes("scheduler"), *workers)]
        assert stack.leader() is stack.processes("scheduler")[0]
        addresses = stack.addresses
        assert len(set(addresses)) == 2

        gateways[1].kill()
        workers[0].kill()
        wait_until(lambda: len(ends) == 2, "the ends")
        for process in (gateways[1], workers[0]):
            wait_until(lambda process=process: process.num_starts == 2, "the second start")
            wait_until(process.is_ready, f"{process.name} is ready", timeout_s=30)
        # A restarted gateway keeps its address.
        assert stack.addresses == addresses
        stack.check()
        with Client(addresses[1]) as client:
            output = client.generate("t1", SamplingParams(max_tokens=4))
            assert output.usage.completion_tokens == 4


def test_a_worker_that_the_scheduler_refuses_ends_the_start(model):
    too_many = {"QUIRE_WORKER_MAX_NUM_SEQS": "64", "QUIRE_SCHEDULER_MAX_NUM_BATCHED_TOKENS": "16"}
    reason = "the scheduler refuses worker-0: max_num_seqs 64 exceeds max_num_batched_tokens 16"
    with pytest.raises(LaunchError, match=reason):
        LocalStack(model, settings={**_SIM, **too_many}).start()


def test_a_stream_continues_after_worker_leader_and_gateway_are_killed(model):
    params = SamplingParams(max_tokens=60, seed=3, ignore_eos=True)
    stack = LocalStack(
        model, num_workers=2, num_schedulers=2, num_gateways=2, settings=_SIM, restart=True
    )
    with stack, Client(",".join(stack.addresses)) as client:
        undisturbed = client.generate("t1 t2 t3", params).outputs[0]
        leader = stack.leader()
        assert leader is not None
        gateway = next(p for p in stack.processes("gateway") if p.address == client.current_target)
        victims = [busiest_worker, lambda _: leader, lambda _: gateway]
        token_ids: list[int] = []
        for delta in client.stream_generate("t1 t2 t3", params):
            for output in delta.outputs:
                assert output.first_token_index == len(token_ids)
                token_ids.extend(output.token_ids)
            if victims and len(token_ids) >= 60 - 15 * len(victims):
                victims.pop(0)(stack).kill()
        assert victims == []
        assert token_ids == undisturbed.token_ids
        wait_until(lambda: stack.leader() is not None, "a leader")


def test_a_stack_on_a_given_redis_has_no_private_one(model, redis_url, lasting_keys):
    # Pools outlive their scheduler, so that the next one can use them.
    lasting_keys.append("quire:{shard:0}:pool:*")
    none = pytest.raises(LaunchError, match="no private Redis")
    with LocalStack(model, redis_url=redis_url, settings=_SIM) as stack, none:
        _ = stack.redis


@pytest.mark.parametrize("name", ["num_workers", "num_schedulers", "num_gateways"])
def test_a_stack_has_at_least_one_of_each_and_at_most_what_fits_a_machine(name):
    with pytest.raises(ValueError, match=rf"{name}: must be at least 1 \(got 0\)"):
        LocalStack("model", **{name: 0})
    with pytest.raises(ValueError, match=rf"{name}: must be at most 1024 .*\(got 1025\)"):
        LocalStack("model", **{name: 1025})
