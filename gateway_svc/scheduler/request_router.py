"""Gives each request to a shard, and moves it where a shard says that it belongs."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import grpc
import structlog

from gateway_svc.scheduler import events
from gateway_svc.scheduler.multiplexer import Multiplexer, scheduler_unavailable
from gateway_svc.scheduler.prefix_keys import PrefixKeys
from gateway_svc.scheduler.request_stream import RequestStream
from gateway_svc.scheduler.route import Route, RoutingCounters
from gateway_svc.scheduler.shard_choice import ShardOrder, choose, rendezvous_order
from gateway_svc.scheduler.shard_loads import ShardLoads, ShardReport
from gateway_svc.scheduler.shard_query import first_found
from quire.internal.v1 import gateway_pb2, scheduler_pb2
from quire.service.errors import RequestError, failed, unavailable

log = structlog.get_logger()

# A shard is full: another one may not be.
_FULL = "QUEUE_FULL"
# A tenant's limit over all shards is reached, unless the shard names another one that has room.
_LIMITS = frozenset(
    {
        "REQUESTS_PER_MINUTE",
        "TOKENS_PER_MINUTE",
        "LIVE_REQUESTS",
        "WAITING_TOKENS",
        "RESUMABLE_REQUESTS",
    }
)
# A stream that shards have sent on more often without accepting it fails: they disagree.
_MAX_MOVES = 8
_MAX_LOOKUPS = 4
# The protocol's limit.
_MAX_SHARDS = 1024


class RequestRouter:
    """The requests of this gateway that are live on any shard.

    With a single shard it adds nothing to a `Multiplexer`.
    """

    def __init__(
        self,
        max_queued_tokens: int,
        wait_s: float,
        counters: RoutingCounters,
        on_shard: Callable[[int, Multiplexer], object],
        was_suspended: Callable[[], bool],
    ) -> None:
        """`on_shard` is called with each new shard, the first one included. `wait_s` bounds the
        wait for the leader of a shard. `was_suspended`: whether this process was, just now."""
        self._max_queued_tokens = max_queued_tokens
        self._wait_s = wait_s
        self._counters = counters
        self._on_shard = on_shard
        self._was_suspended = was_suspended
        self._shards: list[Multiplexer] = []
        self._loads = ShardLoads(self._shards)
        self._keys = PrefixKeys()
        # Of streams whose shard is looked up.
        self._lookups: dict[RequestStream, asyncio.Task[None]] = {}
        # Of all requests.
        self._num_moves = 0
        self.add_shards(1)

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    @property
    def is_idle(self) -> bool:
        return not self._lookups and all(shard.is_idle for shard in self._shards)

    @property
    def streams(self) -> list[RequestStream]:
        return [*self._lookups, *(stream for shard in self._shards for stream in shard.streams)]

    def report(self, source: int, cluster: scheduler_pb2.ClusterState) -> None:
        """Learn the number of shards, and their loads, from the leader of one."""
        self.add_shards(len(cluster.shards))
        reports = [ShardReport(one.num_workers, one.num_live) for one in cluster.shards]
        self._loads.report(source, reports[: self.num_shards])

    def add_shards(self, num_shards: int) -> None:
        """Add shards up to this number."""
        for shard in range(self.num_shards, min(num_shards, _MAX_SHARDS)):
            requests = Multiplexer(
                self._max_queued_tokens, self._wait_s, self._counters.reattached, self._on_failure
            )
            self._shards.append(requests)
            self._on_shard(shard, requests)

    def submit(
        self,
        submission: scheduler_pb2.Submission,
        state: gateway_pb2.ResumeState,
        on_overflow: Callable[[], object],
    ) -> RequestStream:
        """Give a request to a shard, now or when its leader is connected. RequestError if it
        exceeds the size of a frame.
        """
        order = self._order(submission)
        first, *alternatives = order.shards
        stream = self._shards[first].submit(submission, state, on_overflow)
        stream.route = Route(first, alternatives)
        if order.is_spilled:
            self._counters.spilled()
        return stream

    def attach(
        self, attachment: scheduler_pb2.Attachment, on_overflow: Callable[[], object]
    ) -> RequestStream:
        """Take over the stream of a request of any gateway, from its first token."""
        if self.num_shards == 1:
            return self._shards[0].attach(attachment, on_overflow)
        stream = RequestStream(attachment, None, self._max_queued_tokens, on_overflow)
        self._look_up(stream)
        return stream

    def finish(self, stream: RequestStream, choice: int, num_tokens: int) -> None:
        """End a live choice where its text ends; the scheduler confirms the end."""
        if stream.route.shard is not None:
            self._shards[stream.route.shard].finish(stream, choice, num_tokens)
        elif stream.is_live(choice):
            stream.finishes[choice] = num_tokens

    def close(self, stream: RequestStream) -> None:
        """Close the stream of a disconnected client, as `Multiplexer.close` does. Nothing is sent
        while its shard is looked up. A client that has given up waiting for this gateway, which was
        suspended, may resume the request: it runs on as if the gateway was lost."""
        if self._was_suspended():
            self.detach(stream)
        elif stream.route.shard is not None:
            self._shards[stream.route.shard].close(stream)
        else:
            self._end_lookup(stream)

    def detach(self, stream: RequestStream) -> None:
        """Detach from a request that its client may still resume."""
        if stream.route.shard is not None:
            self._shards[stream.route.shard].detach(stream)
        else:
            self._end_lookup(stream)

    def detach_all(self, error: RequestError) -> None:
        """End every stream with `error`; the requests run on and can be resumed elsewhere."""
        for stream in list(self._lookups):
            self._end_lookup(stream)
            stream.fail(error)
        for shard in self._shards:
            shard.detach_all(error)

    async def cancel(self, request_id: str, principal: str = "") -> bool:
        """Cancel a request of any gateway; return whether one of this id was live on any shard."""
        found = await self._ask(lambda shard: shard.cancel(request_id, principal))
        return found is not None

    async def close_lookups(self) -> None:
        """End the streams whose shards are looked up, without an error."""
        tasks = list(self._lookups.values())
        for stream in list(self._lookups):
            self._end_lookup(stream)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _order(self, submission: scheduler_pb2.Submission) -> ShardOrder:
        if self.num_shards == 1:
            return ShardOrder((0,), is_spilled=False)
        key = self._keys.choose(
            submission.prompt_token_ids, submission.cache_salt, self.num_shards, time.monotonic()
        )
        return choose(rendezvous_order(key, self.num_shards), self._loads.all())

    async def _ask(self, ask: Callable[[Multiplexer], Awaitable[bool]]) -> int | None:
        """The shard that has a request; None if all have responded that they do not have it."""
        for _ in range(_MAX_LOOKUPS):
            num_moves = self._num_moves
            found = await first_found(self._shards, ask)
            if found is not None or num_moves == self._num_moves:
                return found
            # It may have been on its way from a shard that was asked late to one asked early.
        return None

    def _on_failure(self, stream: RequestStream, error: RequestError) -> RequestError | None:
        """Continue a stream that its shard has failed elsewhere, or return its final error."""
        reason = error.info.reason
        if error.code is grpc.StatusCode.ABORTED and reason == "OTHER_SHARD":
            return self._follow(stream, error)
        if isinstance(stream.request, scheduler_pb2.Attachment):
            if reason == "UNKNOWN_REQUEST" and self.num_shards > 1:
                return self._look_up_again(stream, error)
        elif reason in _LIMITS and not stream.was_accepted:
            return self._try_named(stream, error)
        elif reason == _FULL and not stream.was_accepted:
            return self._try_next(stream, error)
        return error

    def _follow(self, stream: RequestStream, error: RequestError) -> RequestError | None:
        """Move a stream to the shard that the failure names."""
        shard = _named_shard(error)
        stream.route.num_moves += 1
        if shard is None or stream.route.num_moves > _MAX_MOVES:
            log.warning("a request has no shard", shard=shard, **stream.log_fields)
            metadata = {"resumable": "true"} if stream.was_accepted else None
            message = "the schedulers do not agree on the request's shard"
            return unavailable("NO_SHARD", message, metadata=metadata)
        self.add_shards(shard + 1)
        # The only one that may run it: another one would name it again.
        stream.route.alternatives = ()
        self._counters.moved()
        self._num_moves += 1
        self._move(stream, shard)
        return None

    def _try_named(self, stream: RequestStream, error: RequestError) -> RequestError | None:
        """Give a request beyond a limit to the shard that has room by the refusal, once."""
        shard = _named_shard(error)
        is_possible = shard in stream.route.alternatives and not stream.route.refusals
        stream.route.refusals.append(error)
        if shard is None or not is_possible or not self._loads[shard].is_usable:
            return min(stream.route.refusals, key=events.retry_after_s)
        stream.route.alternatives = (shard,)
        self._counters.refused()
        self._move(stream, shard)
        return None

    def _try_next(self, stream: RequestStream, error: RequestError) -> RequestError | None:
        """Give a refused request to the next shard that may have room."""
        route = stream.route
        route.refusals.append(error)
        route.alternatives = [
            shard
            for shard in route.alternatives
            if shard != route.shard and self._loads[shard].is_usable
        ]
        if not route.alternatives:
            return min(route.refusals, key=events.retry_after_s)
        self._counters.refused()
        self._move(stream, route.alternatives[0])
        return None

    def _move(self, stream: RequestStream, shard: int) -> None:
        stream.detach_from_shard()
        stream.route.shard = shard
        self._shards[shard].adopt(stream)

    def _look_up_again(self, stream: RequestStream, error: RequestError) -> RequestError | None:
        if stream.route.num_lookups >= _MAX_LOOKUPS:
            return error
        stream.detach_from_shard()
        self._look_up(stream)
        return None

    def _look_up(self, stream: RequestStream) -> None:
        """Find the shard of a stream, and attach there."""
        stream.route.shard = None
        stream.route.num_lookups += 1
        stream.start_timeout(self._wait_s, lambda: self._on_lookup_timeout(stream))
        task = asyncio.create_task(self._attach_where_found(stream))
        self._lookups[stream] = task

    async def _attach_where_found(self, stream: RequestStream) -> None:
        request = stream.request
        try:
            found = await self._ask(
                lambda shard: shard.look_up(request.request_id, request.principal)
            )
        except RequestError as error:
            self._end_lookup(stream)
            stream.fail(error)
            return
        if stream not in self._lookups:
            # Closed meanwhile.
            return
        del self._lookups[stream]
        if found is None:
            stream.fail(_unknown())
        else:
            self._move(stream, found)

    def _on_lookup_timeout(self, stream: RequestStream) -> None:
        self._end_lookup(stream)
        stream.fail(scheduler_unavailable(is_resumable=stream.was_accepted))

    def _end_lookup(self, stream: RequestStream) -> None:
        stream.cancel_timeout()
        task = self._lookups.pop(stream, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()


def _named_shard(error: RequestError) -> int | None:
    """The shard that an error names; None if it names none."""
    named = error.info.metadata.get("shard", "")
    return int(named) if named.isdecimal() and int(named) < _MAX_SHARDS else None


def _unknown() -> RequestError:
    """What a scheduler responds for an unknown id."""
    return failed(
        grpc.StatusCode.NOT_FOUND,
        "UNKNOWN_REQUEST",
        "no such request is known, or its record has expired",
        metadata={"resumable": "false"},
    )
