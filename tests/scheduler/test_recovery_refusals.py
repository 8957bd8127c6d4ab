"""Accepted requests are not refused later, however full the queue is."""

from checking_worker import CheckingWorker
from scheduler_stack import info_of, prompt, running_stack
from waiting import until


async def test_a_full_queue_does_not_refuse_a_finished_request(redis_url, sockets):
    """A client that missed its end repeats the request at another gateway."""
    worker = CheckingWorker(1)
    settings = {"max_waiting_requests": 1}
    async with running_stack(redis_url, sockets, {"a": worker}, **settings) as stack:
        gateway, other = await stack.gateway(), await stack.gateway()
        finished = gateway.received[await gateway.submit(prompt(9), request_id="repeated")]
        await gateway.wait_ended()
        await stack.stop_worker("a")
        await until(lambda: not stack.engine.lanes, "the lane's end")
        await gateway.submit(prompt(9), request_id="waits")
        await until(lambda: len(stack.engine.waiting) == 1, "a full queue")
        refused = gateway.received[await gateway.submit(prompt(9), request_id="too many")]
        again = other.received[await other.submit(prompt(9), request_id="repeated")]
        await until(lambda: refused.failure is not None, "a refusal")
        assert info_of(refused.failure).reason == "QUEUE_FULL"
        await until(lambda: again.is_ended, "the finished request")
        assert again.failure is None
        assert again.token_ids == finished.token_ids
        await stack.start_worker("a", CheckingWorker(2))
        await until(lambda: not stack.engine.live, "the end of the queued request")
