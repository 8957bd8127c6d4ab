"""Rows that fail because their request is invalid, which shows only when a worker runs it."""

from checking_worker import CheckingWorker
from google.rpc import error_details_pb2
from grpc import StatusCode
from scheduler_stack import Gateway, info_of, prompt, running_stack
from waiting import until

from quire.internal.v1 import scheduler_pb2, worker_pb2

FIELD = "sampling_params.bad_words"
INVALID_ARGUMENT = StatusCode.INVALID_ARGUMENT.value[0]


def refuse_third_token(worker: CheckingWorker, gateway: Gateway, attachment: int) -> None:
    """Let the row of a request fail once its gateway has two tokens."""
    received = gateway.received[attachment]

    def distort(result: worker_pb2.StepResult) -> None:
        sampled = list(result.sampled_rows)
        rows = [row for row in sampled if worker.seeds.get(row) == received.seed]
        if len(received.token_ids) < 2 or not rows:
            return
        at = sampled.index(rows[0])
        del result.sampled_rows[at], result.sampled_token_ids[at]
        failure = result.failures.add(row=rows[0], reason="excludes every token")
        failure.invalid_field.name = FIELD
        failure.invalid_field.reason = "NO_POSSIBLE_TOKEN"
        worker.distort = lambda result: None

    worker.distort = distort


def check(failure: scheduler_pb2.RequestFailure | None) -> None:
    assert failure is not None
    assert failure.code == INVALID_ARGUMENT
    assert failure.message == f"{FIELD}: excludes every token"
    assert info_of(failure).reason == "NO_POSSIBLE_TOKEN"
    request = error_details_pb2.BadRequest()
    assert failure.details[0].Unpack(request)
    assert [violation.field for violation in request.field_violations] == [FIELD]
    assert failure.opaque == b"state"


async def test_it_ends_with_its_field_for_every_gateway_and_is_not_run_again(redis_url, sockets):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}, lease_s=0.6) as stack:
        gateway = await stack.gateway()
        bad = await gateway.submit(prompt(20, 1), seed=13, max_tokens=30, opaque=b"state")
        refuse_third_token(worker, gateway, bad)
        good = await gateway.submit(prompt(20, 2), seed=2, max_tokens=30)
        failed, received = await gateway.wait_ended(bad, good)
        assert received.is_whole
        check(failed.failure)

        other = await stack.gateway()
        [resumed] = await other.wait_ended(await other.attach(failed))
        check(resumed.failure)

        num_sampled, previous = worker.num_sampled_tokens, stack.member
        successor = stack.start_scheduler()
        await until(lambda: successor.is_standby, "a standby")
        await previous.kill()
        stack.expire_lease(previous)
        later = await stack.gateway()
        [resumed] = await later.wait_ended(await later.attach(failed))
        check(resumed.failure)
        assert worker.num_sampled_tokens == num_sampled
