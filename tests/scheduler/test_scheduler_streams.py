"""The whole scheduler between KV-checking workers and a gateway."""

import asyncio
import random

import pytest
from checking_worker import CheckingWorker, token_at
from grpc import StatusCode
from scheduler_stack import ALREADY_EXISTS, info_of, num_in_flight, prompt, running_stack
from waiting import until

from quire.internal.v1 import scheduler_pb2
from scheduler_svc.engine.dispatcher import Dispatcher
from scheduler_svc.store.store import Store


async def test_a_request_gets_its_tokens_in_order_and_its_end(redis_url, sockets):
    worker = CheckingWorker(incarnation=1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        attachment = await gateway.submit(prompt(10), max_tokens=5, seed=3)
        [received] = await gateway.wait_ended(attachment)
        assert received.accepted
        assert received.token_ids == received.tokens(5)
        assert received.end.reason == scheduler_pb2.END_REASON_LENGTH
        assert received.end.num_tokens == 5


async def test_many_requests_of_mixed_length_are_chunked_share_prefixes_and_all_end(
    redis_url, sockets
):
    worker = CheckingWorker(incarnation=1, num_blocks=40)
    rng = random.Random(0)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        wanted = {}
        for seed in range(40):
            length = rng.choice([1, 3, 4, 5, 8, 16, 31, 40, 48])
            attachment = await gateway.submit(
                prompt(length), max_tokens=rng.randint(1, 12), seed=seed
            )
            wanted[attachment] = seed
        await gateway.wait_ended()
        for attachment in wanted:
            received = gateway.received[attachment]
            assert received.token_ids == received.tokens(received.end.num_tokens)
        assert any(one.end.num_cached_prompt_tokens for one in gateway.received.values())
        assert worker.max_rows > 2


async def test_a_stop_token_ends_a_choice_and_is_its_last_token(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway = await stack.gateway()
        stop = token_at(5, 6 + 3)
        attachment = await gateway.submit(prompt(6), max_tokens=20, seed=5, stop_token_ids=(stop,))
        [received] = await gateway.wait_ended(attachment)
        assert received.token_ids == received.tokens(4)
        assert received.end.reason == scheduler_pb2.END_REASON_STOP_TOKEN
        assert received.end.stop_token_id == stop


async def test_log_probabilities_are_sent_with_the_tokens_if_requested(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateways = [await stack.gateway(), await stack.gateway()]
        for index, num_logprobs in enumerate((0, 1, 0, 21, 2, 0)):
            await gateways[index % 2].submit(
                prompt(9, index),
                max_tokens=10,
                seed=index,
                request_id=str(index),
                n=2,
                num_logprobs=num_logprobs,
            )
        for gateway in gateways:
            assert all(received.is_whole for received in await gateway.wait_ended())


async def test_more_log_probabilities_than_workers_support_are_refused(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway = await stack.gateway()
        [received] = await gateway.wait_ended(await gateway.submit(prompt(9), num_logprobs=22))
        assert received.failure.code == 3
        assert (await gateway.wait_ended(await gateway.submit(prompt(9))))[0].is_whole


async def test_a_repeated_prompt_hits_the_cache(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway = await stack.gateway()
        for cached in (0, 20):
            attachment = await gateway.submit(prompt(22), max_tokens=3)
            [received] = await gateway.wait_ended(attachment)
            assert received.end.num_cached_prompt_tokens == cached


async def test_a_prompt_continued_with_its_output_hits_both(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway = await stack.gateway()
        [first] = await gateway.wait_ended(await gateway.submit(prompt(10), max_tokens=20, seed=2))
        second = await gateway.submit(prompt(10) + first.token_ids, max_tokens=1)
        [received] = await gateway.wait_ended(second)
        # 30 tokens, the last of which was never computed: 7 full blocks of 4.
        assert received.end.num_cached_prompt_tokens == 28


async def test_a_cancelled_request_frees_its_blocks_and_fails_with_cancelled(redis_url, sockets):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        attachment = await gateway.submit(prompt(10), max_tokens=50)
        await until(lambda: bool(gateway.received[attachment].token_ids), "the first token")
        key = scheduler_pb2.RequestKey(request_id=f"request-{attachment}")
        await gateway.send(
            cancellations=[
                scheduler_pb2.Cancellation(request=key, tag=7),
                scheduler_pb2.Cancellation(
                    request=scheduler_pb2.RequestKey(request_id="unknown"), tag=8
                ),
            ]
        )
        [received] = await gateway.wait_ended(attachment)
        assert received.failure.code == 1
        await until(lambda: gateway.cancelled == {7: True, 8: False}, "both results")
        await until(lambda: not worker.rows, "the row's release")


async def test_a_stop_string_found_by_the_gateway_ends_the_choice(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway = await stack.gateway()
        attachment = await gateway.submit(prompt(10), max_tokens=50)
        await until(lambda: len(gateway.received[attachment].token_ids) >= 2, "two tokens")
        await gateway.send(
            finishes=[scheduler_pb2.Finish(attachment=attachment, choice=0, num_tokens=2)]
        )
        [received] = await gateway.wait_ended(attachment)
        assert received.end.reason == scheduler_pb2.END_REASON_STOP_STRING
        assert received.end.num_tokens == 2


async def test_a_lost_gateways_requests_run_on_for_another_one(redis_url, sockets):
    worker = CheckingWorker(1, max_num_seqs=2)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        lost, other = await stack.gateway(), await stack.gateway()
        worker.gate.clear()
        original = [
            lost.received[
                await lost.submit(prompt(8, seed), max_tokens=20, seed=seed, request_id=f"l{seed}")
            ]
            for seed in range(5)
        ]
        await until(lambda: all(one.accepted for one in original), "acceptance")
        await until(lambda: bool(worker.plans), "a running request, and waiting ones")
        await lost.close()
        worker.gate.set()
        await other.submit(prompt(8, 9), max_tokens=3, seed=9, request_id="other")
        for one in original:
            await other.submit_again(one)
        assert all(received.is_whole for received in await other.wait_ended())
        # Nothing was computed twice.
        assert worker.num_sampled_tokens == 5 * 20 + 3
        await until(lambda: not worker.rows, "the release of all rows")


async def test_an_id_belongs_to_one_request_while_its_record_exists(redis_url, sockets):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        worker.gate.clear()
        live = await gateway.submit(prompt(8), max_tokens=4, request_id="same")
        await until(lambda: gateway.received[live].accepted, "acceptance")
        other = await gateway.submit(prompt(8), request_id="same", digest=b"other")
        [refused] = await gateway.wait_ended(other)
        worker.gate.set()
        [received] = await gateway.wait_ended(live)
        assert received.token_ids == received.tokens(4)
        late = await gateway.submit(prompt(8), request_id="same", digest=b"other")
        [late_refused] = await gateway.wait_ended(late)
        for one in (refused, late_refused):
            assert one.failure.code == ALREADY_EXISTS
            assert not one.accepted
        # The same one is not started again: it is replayed.
        num_plans = len(worker.plans)
        again = await gateway.submit(prompt(8), max_tokens=4, request_id="same")
        [received] = await gateway.wait_ended(again)
        assert received.token_ids == received.tokens(4)
        assert not any(plan.admissions.rows for plan in worker.plans[num_plans:])


async def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway = await stack.gateway()
        await until(lambda: gateway.hello.max_model_len == 64, "the model's length")
        long, fits = await gateway.submit(prompt(64)), await gateway.submit(prompt(63))
        refused, received = await gateway.wait_ended(long, fits)
        assert refused.failure.code == 3
        assert "64" in refused.failure.message
        assert "63" in refused.failure.message
        assert received.end.num_tokens == 1


async def test_requests_wait_for_the_first_worker(redis_url, sockets):
    async with running_stack(redis_url, sockets, {}, names=("late",)) as stack:
        gateway = await stack.gateway()
        assert not gateway.hello.ready
        attachments = [await gateway.submit(prompt(8), seed=1), await gateway.submit(prompt(80))]
        await until(lambda: all(one.accepted for one in gateway.received.values()), "acceptance")
        await stack.start_worker("late", CheckingWorker(1))
        received, refused = await gateway.wait_ended(*attachments)
        assert received.token_ids == received.tokens(4)
        assert refused.failure.code == 3
        await until(lambda: gateway.hello.ready, "a ready scheduler")


async def test_two_workers_share_the_queue(redis_url, sockets):
    workers = {name: CheckingWorker(index + 1, max_num_seqs=2) for index, name in enumerate("ab")}
    async with running_stack(redis_url, sockets, workers) as stack:
        gateway = await stack.gateway()
        for seed in range(12):
            await gateway.submit(prompt(8, seed), max_tokens=8, seed=seed)
        for received in await gateway.wait_ended():
            assert received.token_ids == received.tokens(8)
        assert all(worker.num_prefilled_tokens for worker in workers.values())


async def test_a_repeated_prompt_goes_where_its_blocks_are(redis_url, sockets):
    workers = {name: CheckingWorker(index + 1) for index, name in enumerate("ab")}
    async with running_stack(redis_url, sockets, workers) as stack:
        gateway = await stack.gateway()
        for tag in (1, 2):
            await gateway.wait_ended(await gateway.submit(prompt(40, tag), max_tokens=1))
        for tag in (2, 1, 2):
            [received] = await gateway.wait_ended(
                await gateway.submit(prompt(40, tag), max_tokens=1)
            )
            assert received.end.num_cached_prompt_tokens == 36


async def test_a_lost_workers_requests_continue_elsewhere(redis_url, sockets):
    workers = {name: CheckingWorker(index + 1) for index, name in enumerate("ab")}
    async with running_stack(redis_url, sockets, workers) as stack:
        gateway = await stack.gateway()
        for seed in range(4):
            await gateway.submit(prompt(8, seed), max_tokens=40, seed=seed)
        await until(
            lambda: all(len(one.token_ids) > 2 for one in gateway.received.values()),
            "tokens of all",
        )
        assert all(worker.rows for worker in workers.values())
        for worker in workers.values():
            worker.gate.clear()
        await stack.stop_worker("a")
        workers["b"].gate.set()
        for received in await gateway.wait_ended():
            assert received.token_ids == received.tokens(40)
            assert received.end.num_tokens == 40
        # It returns as another incarnation and is used again.
        successor = CheckingWorker(3)
        await stack.start_worker("a", successor)
        await stack.ready(2)
        await until(lambda: len(stack.engine.lanes) == 2, "both lanes")
        for seed in range(8):
            await gateway.submit(prompt(8, seed), max_tokens=8, seed=seed)
        assert all(
            received.token_ids == received.output() for received in await gateway.wait_ended()
        )
        assert successor.num_prefilled_tokens
        await workers["b"].check()
        await successor.check()


async def test_a_failed_row_fails_alone_and_its_blocks_are_not_hit(redis_url, sockets):
    worker = CheckingWorker(1)
    worker.failing_seeds.add(13)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        bad = await gateway.submit(prompt(20, 1), seed=13)
        good = await gateway.submit(prompt(20, 2), seed=2)
        failed, received = await gateway.wait_ended(bad, good)
        assert failed.failure.code == 13
        assert "not finite" in failed.failure.message
        assert received.token_ids == received.tokens(4)
        [again] = await gateway.wait_ended(await gateway.submit(prompt(20, 1), seed=3))
        assert again.end.num_cached_prompt_tokens == 0


async def test_two_names_of_one_worker_are_one_lane(redis_url, sockets):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}, names=("a", "alias")) as stack:
        await stack.start_worker("alias", worker)
        gateway = await stack.gateway()
        for _ in range(3):
            await gateway.wait_ended(await gateway.submit(prompt(30), max_tokens=20))
        assert worker.num_streams == 1


@pytest.mark.parametrize(
    "other",
    [
        CheckingWorker(2, fingerprint=b"other"),
        CheckingWorker(2, block_size=8),
        CheckingWorker(2, max_model_len=32),
        CheckingWorker(2, num_blocks=10),
        CheckingWorker(2, kv_cache_dtype="float8_e4m3fn"),
    ],
    ids=["fingerprint", "block size", "length", "too small a pool", "cache type"],
)
async def test_an_incompatible_worker_is_refused(redis_url, sockets, other):
    async with running_stack(
        redis_url, sockets, {"a": CheckingWorker(1)}, names=("a", "b")
    ) as stack:
        await stack.start_worker("b", other)
        await until(lambda: other.num_streams > 0, "the refused worker's hello")
        await until(lambda: len(stack.engine.refused_workers) == 1, "the reason of the refusal")
        gateway = await stack.gateway()
        for seed in range(6):
            await gateway.submit(prompt(20, seed), seed=seed)
        assert all(received.end for received in await gateway.wait_ended())
        assert not other.plans
        await stack.stop_worker("b")
        await stack.start_worker("b", CheckingWorker(3))
        await until(lambda: not stack.engine.refused_workers, "a worker that is accepted")


async def test_a_drain_delivers_what_is_in_flight_and_leaves_the_rest_to_the_next_leader(
    redis_url, sockets
):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        running = await gateway.submit(prompt(8), max_tokens=50, seed=3)
        received = gateway.received[running]
        await until(lambda: len(received.token_ids) > 3, "some tokens")
        worker.gate.clear()
        await until(lambda: num_in_flight(stack.only_lane) == 2, "plans in flight")
        num_plans, lane = len(worker.plans), stack.only_lane
        stack.signals.drain.set()
        await until(lambda: lane._loop._halting, "the drain")
        worker.gate.set()
        await asyncio.wait_for(stack.serving, 5)
        await until(lambda: gateway.lost is not None, "the end of the gateway's stream")
        assert gateway.lost.code() is StatusCode.UNAVAILABLE
        assert info_of(gateway.lost).reason == "LEAD_ENDS"
        # None but the two plans in flight, and each sampled token was delivered once.
        assert len(worker.plans) <= num_plans + 2
        assert not received.is_ended
        assert received.token_ids == received.tokens(worker.num_sampled_tokens)
        store = Store.at(redis_url)
        assert (await store.lease.leader()).address == ""
        [stored] = await store.load_live()
        assert list(stored.output_token_ids[0]) == received.token_ids
        await store.close()


async def test_a_scheduler_that_lost_leadership_stands_by_and_leads_again(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway = await stack.gateway()
        await gateway.wait_ended(await gateway.submit(prompt(8)))
        stack.expire_lease()
        other = Store.at(redis_url)
        assert await other.lease.acquire("10.0.0.7:50052", lease_ms=1000)
        await until(lambda: gateway.lost is not None, "the end of the gateway's stream")
        assert info_of(gateway.lost).reason == "LEAD_ENDS"
        assert not stack.member.is_leading
        assert not stack.serving.done()
        await other.lease.release()
        await other.close()
        gateway = await stack.gateway()
        [received] = await gateway.wait_ended(await gateway.submit(prompt(8), request_id="after"))
        assert received.token_ids == received.tokens(4)


async def test_steps_that_only_decode_do_not_wake_the_dispatcher(redis_url, sockets, monkeypatch):
    wake, calls = Dispatcher.wake, []

    def counted(dispatcher: Dispatcher) -> None:
        calls.append(dispatcher)
        wake(dispatcher)

    monkeypatch.setattr(Dispatcher, "wake", counted)
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway = await stack.gateway()
        [received] = await gateway.wait_ended(await gateway.submit(prompt(9), max_tokens=40))
        assert received.is_whole
        await until(lambda: stack.only_lane.is_empty, "an empty lane")
    # A new lane, a new request, its prompt and its release.
    assert 0 < len(calls) <= 8
