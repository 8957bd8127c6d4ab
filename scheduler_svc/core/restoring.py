"""Between a request's record in Redis and the group that lives here."""

from array import array
from collections.abc import Iterable, Mapping

from google.rpc import status_pb2

from quire.internal.v1 import scheduler_pb2
from quire.service.errors import RequestError
from scheduler_svc.core.sequence import Group, Nobody, Params, Sequence, Terms
from scheduler_svc.store.journal import JournalEntry
from scheduler_svc.store.requests import Ending, RequestRecord, RequestState, StoredRequest

# First index, tokens and their log-probabilities of each run that a sequence has in the journals.
Runs = list[tuple[int, list[int], bytes]]


def group_of(record: RequestRecord) -> Group:
    """A request as it was accepted; nobody is attached to it."""
    wire = scheduler_pb2.ResolvedParams.FromString(record.params)
    group = Group(
        key=record.key,
        params=Params(
            temperature=wire.temperature,
            top_k=wire.top_k,
            top_p=wire.top_p,
            seed=wire.seed,
            max_tokens=wire.max_tokens,
            num_logprobs=wire.num_logprobs,
            num_prompt_logprobs=wire.num_prompt_logprobs,
            min_p=wire.min_p,
        ),
        subscriber=Nobody(),
        terms=Terms(
            record.digest, record.params, record.opaque, record.deadline_ms, record.resume_window_s
        ),
        priority=record.priority,
        cache_salt=record.cache_salt,
    )
    prompt = array("I", record.prompt_token_ids)
    stop_token_ids = frozenset(wire.stop_token_ids)
    group.sequences = [
        Sequence(
            record.sequence_id + choice,
            group,
            choice,
            prompt[:],
            num_prompt_tokens=len(prompt),
            num_tokens=len(prompt),
            stop_token_ids=stop_token_ids,
        )
        for choice in range(record.num_choices)
    ]
    return group


def restored(stored: StoredRequest, journaled: Mapping[int, Runs]) -> Group:
    """A stored request with what was folded of it, and journaled since."""
    group = group_of(stored.record)
    for sequence in group.sequences:
        token_ids = list(stored.output_token_ids.get(sequence.choice, ()))
        sequence.logprobs += stored.output_logprobs.get(sequence.choice, b"")
        sequence.num_folded = len(token_ids)
        for first, run, logprobs in sorted(journaled.get(sequence.sequence_id, ())):
            # A run may begin before what is known, never behind it while nothing is lost.
            if (num_known := len(token_ids) - first) >= 0:
                token_ids += run[num_known:]
                sequence.logprobs += logprobs[num_known * sequence.logprobs_bytes :]
        sequence.token_ids.extend(token_ids)
        sequence.num_journaled = len(token_ids)
        sequence.num_tokens = len(sequence.token_ids)
        sequence.was_preempted = sequence.was_lost = bool(token_ids)
        if stored.num_cached_tokens:
            sequence.num_cached_tokens = stored.num_cached_tokens
        sequence.end_if_complete()
    return group


def runs_of(entries: Iterable[JournalEntry]) -> dict[int, Runs]:
    """The runs of each sequence, by its id."""
    runs: dict[int, Runs] = {}
    for entry in entries:
        stored, start = entry.runs, 0
        for sequence_id, first, end, logprobs in zip(
            stored.sequence_ids,
            stored.first_indices,
            stored.next_indices,
            stored.logprobs or [b""] * len(stored.sequence_ids),
            strict=True,
        ):
            token_ids = list(stored.token_ids[start : start + end - first])
            runs.setdefault(sequence_id, []).append((first, token_ids, logprobs))
            start += end - first
    return runs


def homes_of(journals: Mapping[int, Iterable[JournalEntry]]) -> dict[int, int]:
    """The pool where each sequence had tokens last, from the pools' journals."""
    last: dict[int, tuple[int, int]] = {}  # next index, pool
    for pool, entries in journals.items():
        for entry in entries:
            for sequence_id, end in zip(
                entry.runs.sequence_ids, entry.runs.next_indices, strict=True
            ):
                last[sequence_id] = max(last.get(sequence_id, (0, 0)), (end, pool))
    return {sequence_id: pool for sequence_id, (_, pool) in last.items()}


def stored_of(group: Group) -> StoredRequest:
    """A live request as its record has to be."""
    first = group.sequences[0]
    terms = group.terms
    record = RequestRecord(
        key=group.key,
        digest=terms.digest,
        prompt_token_ids=first.token_ids[: first.num_prompt_tokens],
        params=terms.params,
        sequence_id=first.sequence_id,
        deadline_ms=terms.deadline_ms,
        opaque=terms.opaque,
        num_choices=len(group.sequences),
        priority=group.priority,
        cache_salt=group.cache_salt,
        resume_window_s=terms.resume_window_s,
    )
    logprobs = {
        other.choice: other.logprobs_of(0, other.num_journaled)
        for other in group.sequences
        if other.logprobs
    }
    return StoredRequest(
        record,
        RequestState.LIVE,
        output_token_ids={other.choice: other.journaled for other in group.sequences},
        output_logprobs=logprobs,
    )


def ending_of(group: Group) -> Ending:
    """How a request that is over has ended."""
    num_cached = group.sequences[0].num_cached_prompt_tokens
    if group.error is None:
        return Ending(group.key, RequestState.FINISHED, num_cached_tokens=num_cached)
    cancelled = group.error.code.name == "CANCELLED"
    state = RequestState.CANCELLED if cancelled else RequestState.FAILED
    return Ending(group.key, state, group.error.to_status().SerializeToString(), num_cached)


def error_of(stored: StoredRequest) -> RequestError | None:
    """Why a stored request ended, if it did so with an error."""
    if stored.state in (RequestState.LIVE, RequestState.FINISHED):
        return None
    return RequestError.from_status(status_pb2.Status.FromString(stored.status))
