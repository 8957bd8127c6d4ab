"""What was accepted is not refused later, however full the queue has become."""

from ledger_worker import LedgerWorker
from scheduler_stack import info_of, prompt, running_stack
from waiting import until


async def test_a_full_queue_does_not_refuse_what_has_finished(redis_url, sockets):
    """A client that has not heard of its end asks again, at another gateway."""
    worker = LedgerWorker(1)
    settings = {"max_waiting_requests": 1}
    async with running_stack(redis_url, sockets, {"a": worker}, **settings) as stack:
        gateway, other = await stack.gateway(), await stack.gateway()
        finished = gateway.heard[await gateway.submit(prompt(9), request_id="asked twice")]
        await gateway.over()
        await stack.stop_worker("a")
        await until(lambda: not stack.engine.lanes, "the lane's end")
        await gateway.submit(prompt(9), request_id="waits")
        await until(lambda: len(stack.engine.waiting) == 1, "a full queue")
        refused = gateway.heard[await gateway.submit(prompt(9), request_id="too many")]
        again = other.heard[await other.submit(prompt(9), request_id="asked twice")]
        await until(lambda: refused.failure is not None, "a refusal")
        assert info_of(refused.failure).reason == "QUEUE_FULL"
        await until(lambda: again.over, "the finished request")
        assert again.failure is None
        assert again.token_ids == finished.token_ids
        await stack.start_worker("a", LedgerWorker(2))
        await until(lambda: not stack.engine.live, "the end of what waits")
