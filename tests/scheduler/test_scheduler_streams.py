"""The whole scheduler between ledger workers and a gateway."""

import asyncio
import random

import pytest
from grpc import StatusCode
from ledger_worker import LedgerWorker, token_at
from scheduler_stack import ALREADY_EXISTS, info_of, prompt, running_stack
from waiting import until

from quire.internal.v1 import scheduler_pb2
from scheduler_svc.engine import Engine
from scheduler_svc.store.store import Store


async def test_a_request_gets_its_tokens_in_order_and_its_end(redis_url, sockets):
    worker = LedgerWorker(incarnation=1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        attachment = await gateway.submit(prompt(10), max_tokens=5, seed=3)
        [heard] = await gateway.over(attachment)
        assert heard.accepted
        assert heard.token_ids == heard.tokens(5)
        assert heard.end.reason == scheduler_pb2.END_REASON_LENGTH
        assert heard.end.num_tokens == 5


async def test_many_requests_of_mixed_length_are_chunked_share_prefixes_and_all_end(
    redis_url, sockets
):
    worker = LedgerWorker(incarnation=1, num_blocks=40)
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
        await gateway.over()
        for attachment in wanted:
            heard = gateway.heard[attachment]
            assert heard.token_ids == heard.tokens(heard.end.num_tokens)
        assert any(one.end.num_cached_prompt_tokens for one in gateway.heard.values())
        assert worker.max_rows > 2


async def test_a_stop_token_ends_a_choice_and_is_its_last_token(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": LedgerWorker(1)}) as stack:
        gateway = await stack.gateway()
        stop = token_at(5, 6 + 3)
        attachment = await gateway.submit(prompt(6), max_tokens=20, seed=5, stop_token_ids=(stop,))
        [heard] = await gateway.over(attachment)
        assert heard.token_ids == heard.tokens(4)
        assert heard.end.reason == scheduler_pb2.END_REASON_STOP_TOKEN
        assert heard.end.stop_token_id == stop


async def test_log_probabilities_come_with_the_tokens_of_those_who_asked(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": LedgerWorker(1)}) as stack:
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
            assert all(heard.is_whole for heard in await gateway.over())


async def test_more_log_probabilities_than_workers_give_are_refused(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": LedgerWorker(1)}) as stack:
        gateway = await stack.gateway()
        [heard] = await gateway.over(await gateway.submit(prompt(9), num_logprobs=22))
        assert heard.failure.code == 3
        assert (await gateway.over(await gateway.submit(prompt(9))))[0].is_whole


async def test_a_repeated_prompt_hits_the_cache(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": LedgerWorker(1)}) as stack:
        gateway = await stack.gateway()
        for cached in (0, 20):
            attachment = await gateway.submit(prompt(22), max_tokens=3)
            [heard] = await gateway.over(attachment)
            assert heard.end.num_cached_prompt_tokens == cached


async def test_a_prompt_continued_with_its_output_hits_both(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": LedgerWorker(1)}) as stack:
        gateway = await stack.gateway()
        [first] = await gateway.over(await gateway.submit(prompt(10), max_tokens=20, seed=2))
        second = await gateway.submit(prompt(10) + first.token_ids, max_tokens=1)
        [heard] = await gateway.over(second)
        # 30 tokens, the last of which was never computed: 7 full blocks of 4.
        assert heard.end.num_cached_prompt_tokens == 28


async def test_a_cancelled_request_frees_its_blocks_and_says_so(redis_url, sockets):
    worker = LedgerWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        attachment = await gateway.submit(prompt(10), max_tokens=50)
        await until(lambda: bool(gateway.heard[attachment].token_ids), "the first token")
        key = scheduler_pb2.RequestKey(request_id=f"request-{attachment}")
        await gateway.send(
            cancellations=[
                scheduler_pb2.Cancellation(request=key, tag=7),
                scheduler_pb2.Cancellation(
                    request=scheduler_pb2.RequestKey(request_id="nobody"), tag=8
                ),
            ]
        )
        [heard] = await gateway.over(attachment)
        assert heard.failure.code == 1
        await until(lambda: gateway.cancelled == {7: True, 8: False}, "both answers")
        await until(lambda: not worker.rows, "the row's release")


async def test_a_stop_string_found_by_the_gateway_ends_the_choice(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": LedgerWorker(1)}) as stack:
        gateway = await stack.gateway()
        attachment = await gateway.submit(prompt(10), max_tokens=50)
        await until(lambda: len(gateway.heard[attachment].token_ids) >= 2, "two tokens")
        await gateway.send(
            finishes=[scheduler_pb2.Finish(attachment=attachment, choice=0, num_tokens=2)]
        )
        [heard] = await gateway.over(attachment)
        assert heard.end.reason == scheduler_pb2.END_REASON_STOP_STRING
        assert heard.end.num_tokens == 2


async def test_a_lost_gateway_s_requests_run_on_for_another_one(redis_url, sockets):
    worker = LedgerWorker(1, max_num_seqs=2)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        lost, other = await stack.gateway(), await stack.gateway()
        worker.gate.clear()
        asked = [
            lost.heard[
                await lost.submit(prompt(8, seed), max_tokens=20, seed=seed, request_id=f"l{seed}")
            ]
            for seed in range(5)
        ]
        await until(lambda: all(one.accepted for one in asked), "acceptance")
        await until(lambda: bool(worker.plans), "a running request, and waiting ones")
        await lost.close()
        worker.gate.set()
        await other.submit(prompt(8, 9), max_tokens=3, seed=9, request_id="other")
        for one in asked:
            await other.submit_again(one)
        assert all(heard.is_whole for heard in await other.over())
        # Nobody was computed twice.
        assert worker.num_sampled_tokens == 5 * 20 + 3
        await until(lambda: not worker.rows, "the release of all rows")


async def test_an_id_belongs_to_one_request_as_long_as_it_is_remembered(redis_url, sockets):
    worker = LedgerWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        worker.gate.clear()
        live = await gateway.submit(prompt(8), max_tokens=4, request_id="same")
        await until(lambda: gateway.heard[live].accepted, "acceptance")
        other = await gateway.submit(prompt(8), request_id="same", digest=b"other")
        [refused] = await gateway.over(other)
        worker.gate.set()
        [heard] = await gateway.over(live)
        assert heard.token_ids == heard.tokens(4)
        late = await gateway.submit(prompt(8), request_id="same", digest=b"other")
        [late_refused] = await gateway.over(late)
        for one in (refused, late_refused):
            assert one.failure.code == ALREADY_EXISTS
            assert not one.accepted
        # The same one is not begun again: it is said again.
        num_plans = len(worker.plans)
        again = await gateway.submit(prompt(8), max_tokens=4, request_id="same")
        [heard] = await gateway.over(again)
        assert heard.token_ids == heard.tokens(4)
        assert not any(plan.admissions.rows for plan in worker.plans[num_plans:])


async def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": LedgerWorker(1)}) as stack:
        gateway = await stack.gateway()
        await until(lambda: gateway.hello.max_model_len == 64, "the model's length")
        long, fits = await gateway.submit(prompt(64)), await gateway.submit(prompt(63))
        refused, heard = await gateway.over(long, fits)
        assert refused.failure.code == 3
        assert "64" in refused.failure.message
        assert "63" in refused.failure.message
        assert heard.end.num_tokens == 1


async def test_requests_wait_for_the_first_worker(redis_url, sockets):
    async with running_stack(redis_url, sockets, {}, names=("late",)) as stack:
        gateway = await stack.gateway()
        assert not gateway.hello.ready
        attachments = [await gateway.submit(prompt(8), seed=1), await gateway.submit(prompt(80))]
        await until(lambda: all(one.accepted for one in gateway.heard.values()), "acceptance")
        await stack.start_worker("late", LedgerWorker(1))
        heard, refused = await gateway.over(*attachments)
        assert heard.token_ids == heard.tokens(4)
        assert refused.failure.code == 3
        await until(lambda: gateway.hello.ready, "a ready scheduler")


async def test_two_workers_share_the_queue(redis_url, sockets):
    workers = {name: LedgerWorker(index + 1, max_num_seqs=2) for index, name in enumerate("ab")}
    async with running_stack(redis_url, sockets, workers) as stack:
        gateway = await stack.gateway()
        for seed in range(12):
            await gateway.submit(prompt(8, seed), max_tokens=8, seed=seed)
        for heard in await gateway.over():
            assert heard.token_ids == heard.tokens(8)
        assert all(worker.num_prefilled_tokens for worker in workers.values())


async def test_a_repeated_prompt_goes_where_its_blocks_are(redis_url, sockets):
    workers = {name: LedgerWorker(index + 1) for index, name in enumerate("ab")}
    async with running_stack(redis_url, sockets, workers) as stack:
        gateway = await stack.gateway()
        for tag in (1, 2):
            await gateway.over(await gateway.submit(prompt(40, tag), max_tokens=1))
        for tag in (2, 1, 2):
            [heard] = await gateway.over(await gateway.submit(prompt(40, tag), max_tokens=1))
            assert heard.end.num_cached_prompt_tokens == 36


async def test_a_lost_worker_s_requests_go_on_elsewhere(redis_url, sockets):
    workers = {name: LedgerWorker(index + 1) for index, name in enumerate("ab")}
    async with running_stack(redis_url, sockets, workers) as stack:
        gateway = await stack.gateway()
        for seed in range(4):
            await gateway.submit(prompt(8, seed), max_tokens=40, seed=seed)
        await until(
            lambda: all(len(one.token_ids) > 2 for one in gateway.heard.values()),
            "tokens of all",
        )
        assert all(worker.rows for worker in workers.values())
        for worker in workers.values():
            worker.gate.clear()
        await stack.stop_worker("a")
        workers["b"].gate.set()
        for heard in await gateway.over():
            assert heard.token_ids == heard.tokens(40)
            assert heard.end.num_tokens == 40
        # It comes back as another incarnation and is used again.
        successor = LedgerWorker(3)
        await stack.start_worker("a", successor)
        await stack.ready(2)
        await until(lambda: len(stack.engine.lanes) == 2, "both lanes")
        for seed in range(8):
            await gateway.submit(prompt(8, seed), max_tokens=8, seed=seed)
        assert all(heard.token_ids == heard.output() for heard in await gateway.over())
        assert successor.num_prefilled_tokens
        await workers["b"].check()
        await successor.check()


async def test_a_failed_row_fails_alone_and_its_blocks_are_not_hit(redis_url, sockets):
    worker = LedgerWorker(1)
    worker.failing_seeds.add(13)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        bad = await gateway.submit(prompt(20, 1), seed=13)
        good = await gateway.submit(prompt(20, 2), seed=2)
        failed, heard = await gateway.over(bad, good)
        assert failed.failure.code == 13
        assert "not finite" in failed.failure.message
        assert heard.token_ids == heard.tokens(4)
        [again] = await gateway.over(await gateway.submit(prompt(20, 1), seed=3))
        assert again.end.num_cached_prompt_tokens == 0


async def test_two_names_of_one_worker_are_one_lane(redis_url, sockets):
    worker = LedgerWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}, names=("a", "alias")) as stack:
        await stack.start_worker("alias", worker)
        gateway = await stack.gateway()
        for _ in range(3):
            await gateway.over(await gateway.submit(prompt(30), max_tokens=20))
        assert worker.num_streams == 1


@pytest.mark.parametrize(
    "other",
    [
        LedgerWorker(2, fingerprint=b"other"),
        LedgerWorker(2, block_size=8),
        LedgerWorker(2, max_model_len=32),
        LedgerWorker(2, num_blocks=10),
        LedgerWorker(2, kv_cache_dtype="float8_e4m3fn"),
    ],
    ids=["fingerprint", "block size", "length", "too small a pool", "cache type"],
)
async def test_a_worker_that_does_not_fit_is_refused(redis_url, sockets, other):
    async with running_stack(redis_url, sockets, {"a": LedgerWorker(1)}, names=("a", "b")) as stack:
        await stack.start_worker("b", other)
        await until(lambda: other.num_streams > 0, "the refused worker's hello")
        gateway = await stack.gateway()
        for seed in range(6):
            await gateway.submit(prompt(20, seed), seed=seed)
        assert all(heard.end for heard in await gateway.over())
        assert not other.plans


async def test_a_drain_delivers_what_is_in_flight_and_leaves_the_rest_to_the_next_leader(
    redis_url, sockets
):
    worker = LedgerWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        running = await gateway.submit(prompt(8), max_tokens=50, seed=3)
        heard = gateway.heard[running]
        await until(lambda: len(heard.token_ids) > 3, "some tokens")
        worker.gate.clear()
        await until(lambda: len(stack.only_lane._flights) == 2, "plans in flight")
        num_plans = len(worker.plans)
        stack.signals.drain.set()
        worker.gate.set()
        await asyncio.wait_for(stack.serving, 5)
        await until(lambda: gateway.lost is not None, "the end of the gateway's stream")
        assert gateway.lost.code() is StatusCode.UNAVAILABLE
        assert info_of(gateway.lost).reason == "LEAD_ENDS"
        # No plan more, and each token that was sampled has been delivered, once.
        assert len(worker.plans) <= num_plans + 2
        assert not heard.over
        assert heard.token_ids == heard.tokens(worker.num_sampled_tokens)
        store = await Store.connect(redis_url)
        leader, [stored] = await store.leader(), await store.load_live()
        assert leader.idle_ms is None
        assert list(stored.output_token_ids[0]) == heard.token_ids
        await store.close()


async def test_a_scheduler_that_has_lost_the_lead_stands_by_and_leads_again(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": LedgerWorker(1)}) as stack:
        gateway = await stack.gateway()
        await gateway.over(await gateway.submit(prompt(8)))
        stack.lapse()
        other = await Store.connect(redis_url)
        assert await other.take_lead("10.0.0.7:50052", lease_ms=1000)
        await until(lambda: gateway.lost is not None, "the end of the gateway's stream")
        assert info_of(gateway.lost).reason == "LEAD_ENDS"
        assert not stack.scheduler.leading
        assert not stack.serving.done()
        await other.release_lead()
        await other.close()
        gateway = await stack.gateway()
        [heard] = await gateway.over(await gateway.submit(prompt(8), request_id="after"))
        assert heard.token_ids == heard.tokens(4)


async def test_steps_that_only_decode_have_nobody_look_for_room(redis_url, sockets, monkeypatch):
    room, looks = Engine.room, []

    def counted(engine: Engine) -> None:
        looks.append(engine)
        room(engine)

    monkeypatch.setattr(Engine, "room", counted)
    async with running_stack(redis_url, sockets, {"a": LedgerWorker(1)}) as stack:
        gateway = await stack.gateway()
        [heard] = await gateway.over(await gateway.submit(prompt(9), max_tokens=40))
        assert heard.is_whole
        await until(lambda: stack.only_lane.is_empty, "an empty lane")
    # Its prompt, and its leaving.
    assert 0 < len(looks) <= 4
