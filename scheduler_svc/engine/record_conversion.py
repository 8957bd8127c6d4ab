"""Converts between request records in Redis and live groups."""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace

from google.rpc import status_pb2

from quire.internal.v1 import scheduler_pb2
from quire.service.errors import RequestError
from scheduler_svc.beams.search import EarlyStopping, SearchParams
from scheduler_svc.beams.state import BeamState
from scheduler_svc.core.beams import recover_beams, restart_beams
from scheduler_svc.core.request import Params
from scheduler_svc.core.sequence import Group, NullSubscriber, Sequence
from scheduler_svc.store.requests import Ending, RequestRecord, RequestState, StoredRequest
from scheduler_svc.store.types import JournalEntry

# The journaled token ranges of one sequence: first index, tokens, packed log-probabilities of them
# and of the prompt.
Ranges = list[tuple[int, list[int], bytes, bytes]]


def group_of(record: RequestRecord) -> Group:
    """Build the group of an accepted request, attached to no stream."""
    resolved = scheduler_pb2.ResolvedParams.FromString(record.params)
    group = Group(
        record=replace(record, prompt_token_ids=()),
        params=Params(**{x.name: getattr(resolved, x.name) for x in fields(Params)}),
        subscriber=NullSubscriber(),
    )
    prompt = array("I", record.prompt_token_ids)
    stop_token_ids = frozenset(resolved.stop_token_ids)
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
        for choice in range(group.params.beam_width or record.num_choices)
    ]
    if group.params.beam_width:
        group.beams = BeamState(_search_params(group.params, stop_token_ids))
        restart_beams(group)
    return group


def _search_params(params: Params, stop_token_ids: frozenset[int]) -> SearchParams:
    return SearchParams(
        width=params.beam_width,
        max_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=EarlyStopping(params.early_stopping),
        stop_token_ids=stop_token_ids,
    )


def from_record(stored: StoredRequest, journaled: Mapping[int, Ranges]) -> Group:
    """Build the group of a stored request from its record and the journaled token ranges."""
    group = group_of(stored.record)
    group.sequences[0].prompt_logprobs += stored.prompt_logprobs
    for sequence in group.outputs:
        token_ids = list(stored.output_token_ids.get(sequence.choice, ()))
        sequence.logprobs += stored.output_logprobs.get(sequence.choice, b"")
        sequence.num_recorded = len(token_ids)
        for first, tokens, logprobs, prompt_logprobs in sorted(
            journaled.get(sequence.sequence_id, ())
        ):
            # A range may overlap the known tokens; one after a gap, from lost writes, is skipped.
            if (num_known := len(token_ids) - first) >= 0:
                token_ids += tokens[num_known:]
                sequence.logprobs += logprobs[num_known * sequence.logprobs_bytes :]
                sequence.prompt_logprobs += prompt_logprobs[len(sequence.prompt_logprobs) :]
        sequence.num_journaled = len(token_ids)
        if group.beams is not None:
            recover_beams(group)
        else:
            sequence.token_ids.extend(token_ids)
            sequence.num_tokens = len(sequence.token_ids)
        sequence.has_precedence = sequence.was_lost = bool(token_ids)
        if stored.num_cached_tokens:
            sequence.num_cached_tokens = stored.num_cached_tokens
        sequence.end_if_complete()
    return group


def ranges_of(entries: Iterable[JournalEntry]) -> dict[int, Ranges]:
    """Collect the token ranges of each sequence, by its id."""
    ranges: dict[int, Ranges] = {}
    for entry in entries:
        stored, start = entry.token_ranges, 0
        none = [b""] * len(stored.sequence_ids)
        for sequence_id, first, end, logprobs, prompt_logprobs in zip(
            stored.sequence_ids,
            stored.first_indices,
            stored.next_indices,
            stored.logprobs or none,
            stored.prompt_logprobs or none,
            strict=True,
        ):
            token_ids = list(stored.token_ids[start : start + end - first])
            entry_range = (first, token_ids, logprobs, prompt_logprobs)
            ranges.setdefault(sequence_id, []).append(entry_range)
            start += end - first
    return ranges


def last_pools(journals: Mapping[int, Iterable[JournalEntry]]) -> dict[int, int]:
    """Find the pool that journaled each sequence's last token, by sequence id."""
    last: dict[int, tuple[int, int]] = {}  # next index, pool
    for pool, entries in journals.items():
        for entry in entries:
            for sequence_id, end in zip(
                entry.token_ranges.sequence_ids, entry.token_ranges.next_indices, strict=True
            ):
                last[sequence_id] = max(last.get(sequence_id, (0, 0)), (end, pool))
    return {sequence_id: pool for sequence_id, (_, pool) in last.items()}


def to_record(group: Group) -> StoredRequest:
    """Build the record of a live request."""
    first = group.sequences[0]
    prompt = first.token_ids[: first.num_prompt_tokens]
    logprobs = {
        other.choice: other.logprobs_of(0, other.num_journaled)
        for other in group.outputs
        if other.logprobs
    }
    return StoredRequest(
        replace(group.record, prompt_token_ids=prompt),
        RequestState.LIVE,
        output_token_ids={other.choice: other.journaled for other in group.outputs},
        output_logprobs=logprobs,
        prompt_logprobs=bytes(first.prompt_logprobs) if first.num_journaled else b"",
    )


def ending_of(group: Group) -> Ending:
    """Describe how an ended request ended."""
    num_cached = group.sequences[0].num_cached_prompt_tokens
    if group.error is None:
        return Ending(group.key, RequestState.FINISHED, num_cached_tokens=num_cached)
    cancelled = group.error.code.name == "CANCELLED"
    state = RequestState.CANCELLED if cancelled else RequestState.FAILED
    return Ending(group.key, state, group.error.to_status().SerializeToString(), num_cached)


def error_of(stored: StoredRequest) -> RequestError | None:
    """The error that ended a stored request; None if it is live or finished."""
    if stored.state in (RequestState.LIVE, RequestState.FINISHED):
        return None
    return RequestError.from_status(status_pb2.Status.FromString(stored.status))
