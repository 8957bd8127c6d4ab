"""The generations of one HTTP request: one per prompt, merged into one sequence of updates."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, aclosing
from dataclasses import dataclass
from functools import partial

from gateway_svc.access.tenant import Tenant
from gateway_svc.generation.beam_search import Search
from gateway_svc.generation.choice import ChoiceUpdate
from gateway_svc.generation.generation import Generation
from gateway_svc.generation.service import GenerationService
from gateway_svc.http.bodies.fields import GenerationMessage, prompt_id
from gateway_svc.http.event_id import EventId
from gateway_svc.http.merge import Merge
from gateway_svc.metrics.request_metrics import GatewayMetrics, RequestTimes
from quire.internal.v1 import gateway_pb2
from quire.v1 import inference_pb2


@dataclass(frozen=True)
class PromptUpdate:
    """What an update added to the output of one prompt; no parts at its acceptance."""

    prompt: int
    generation: Generation
    parts: Sequence[ChoiceUpdate]


Updates = AsyncGenerator[PromptUpdate, None]


class Generations:
    """Starts and resumes the generations of HTTP requests."""

    def __init__(self, service: GenerationService, metrics: GatewayMetrics) -> None:
        self._service = service
        self._metrics = metrics

    async def run(
        self,
        messages: Sequence[GenerationMessage],
        states: Sequence[gateway_pb2.HttpState],
        tenant: Tenant,
        has_client_id: bool,
        search: Search | None = None,
    ) -> Updates:
        """Yield the updates of all prompts. RequestError, before the first update, if one of them
        is invalid; no prompt is started then. `has_client_id`: the ids were not made here."""
        with ExitStack() as measured:
            times = [
                measured.enter_context(self._metrics.request(tenant.tenant_class)) for _ in messages
            ]
            prepared = []
            # Cancelled by this id until the last prompt is prepared.
            with self._service.in_preparation(messages[0].request_id, tenant):
                for message, state in zip(messages, states, strict=True):
                    prepared.append(
                        await self._service.prepare(message, None, tenant, state, search)
                    )
                    if len(messages) > 1:
                        # Token ids are prepared without waiting, and other requests should not
                        # wait for a thousand prompts.
                        await asyncio.sleep(0)
            for one in prepared:
                one.submission.has_client_id = has_client_id
            sources = [
                _prompt_updates(prompt, partial(self._service.start, one), time)
                for prompt, (one, time) in enumerate(zip(prepared, times, strict=True))
            ]
            # A single prompt needs no task of its own.
            async with aclosing(sources[0] if len(sources) == 1 else _merged(sources)) as updates:
                async for update in updates:
                    yield update

    async def resume(self, request_id: str, event_id: EventId, tenant: Tenant) -> Updates:
        """Yield the updates of a request that runs or has ended, after the client's last event.
        RequestError, before the first update, if the event is of a request of another shape."""
        with self._metrics.resumed_request(tenant.tenant_class) as times:

            def source(prompt: int) -> Updates:
                request = inference_pb2.ResumeGenerateRequest(
                    request_id=prompt_id(request_id, prompt),
                    next_token_indices=event_id.next_indices(prompt),
                )
                resume = partial(self._service.resume, request, tenant)
                return _prompt_updates(prompt, resume, times.of_another_prompt())

            merge = Merge[PromptUpdate]()
            merge.add(source(0))
            num_prompts = 1
            is_checked = False
            async with aclosing(merge.items()) as updates:
                async for update in updates:
                    state = update.generation.state
                    if not is_checked:
                        in_all = state.http.num_prompts if state is not None else 1
                        event_id.check(max(in_all, 1), len(update.generation.choices))
                        is_checked = True
                    # Any prompt's state has their number.
                    while state is not None and num_prompts < state.http.num_prompts:
                        merge.add(source(num_prompts))
                        num_prompts += 1
                    yield update


def _merged(sources: Sequence[Updates]) -> Updates:
    merge = Merge[PromptUpdate]()
    for source in sources:
        merge.add(source)
    return merge.items()


async def _prompt_updates(
    prompt: int, start: Callable[[], AbstractAsyncContextManager[Generation]], times: RequestTimes
) -> Updates:
    """`start` is called in the task that reads the updates, which a slow client ends; `Merge` ends
    its own reader with it."""
    async with start() as generation:
        async for parts in generation.updates():
            times.observe(parts)
            yield PromptUpdate(prompt, generation, parts)
