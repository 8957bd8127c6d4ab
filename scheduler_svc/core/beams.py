"""Sequences of a beam search: how they restart, fork, end, and go back to what is journaled."""

from scheduler_svc.core.request import End, EndReason
from scheduler_svc.core.sequence import Group, Sequence


def rewind(sequence: Sequence) -> None:
    """Return a sequence to the journaled tokens after its lane is lost. Later tokens are sampled
    again, with the same result. Of a search, the first beam has its log: it is rewound first."""
    del sequence.logprobs[sequence.num_journaled * sequence.logprobs_bytes :]
    if sequence.end is not None and sequence.end.reason is not EndReason.STOP_STRING:
        sequence.end = None
    sequence.was_lost |= sequence.last_step > 0
    sequence.has_precedence |= sequence.last_step > 0
    sequence.row = sequence.lane_incarnation = None
    sequence.is_on_worker = False
    sequence.last_step = 0
    sequence.reset_blocks()
    sequence.last_published_blocks = []
    if not sequence.is_beam:
        del sequence.token_ids[sequence.num_prompt_tokens + sequence.num_journaled :]
        if sequence.chain is not None:
            sequence.chain.truncate(len(sequence.token_ids))
        sequence.end_if_complete()
        sequence.num_tokens = len(sequence.token_ids)
    elif sequence.is_first:
        recover_beams(sequence.group)


def recover_beams(group: Group) -> None:
    """Continue a search after its journaled steps."""
    first = group.sequences[0]
    assert group.beams is not None
    group.beams.recover(bytes(first.logprobs), first.num_journaled)
    for sequence in group.sequences:
        sequence.end = None
    restart_beams(group)
    end_if_searched(group)


def restart_beams(group: Group) -> None:
    """Begin with one row and the tokens that all beams share; other rows are forked from it."""
    first, *others = group.sequences
    assert group.beams is not None
    del first.token_ids[first.num_prompt_tokens :]
    if first.chain is not None:
        first.chain.truncate(first.num_prompt_tokens)
    first.token_ids.extend(group.beams.restart())
    first.num_tokens = len(first.token_ids)
    group.siblings = others


def end_if_searched(group: Group) -> None:
    """End the sequences of a search that is done, as its best hypothesis has ended."""
    assert group.beams is not None
    search = group.beams.search
    if not search.is_done:
        return
    last, num_steps = search.hypotheses[0].token_ids[-1], len(search.steps)
    end = End(EndReason.LENGTH, num_steps)
    if last in search.params.stop_token_ids:
        end = End(EndReason.STOP_TOKEN, num_steps, last)
    for sequence in group.sequences:
        sequence.end = end


def take_result(sequence: Sequence, step: int, packed: bytes) -> bool:
    """Take the result of a beam's row. Whether the search has gained a step by it."""
    group = sequence.group
    beams = group.beams
    assert beams is not None
    if not beams.take(sequence.choice, step, packed):
        return False
    chosen = beams.choose()
    if chosen is None:
        return False
    group.sequences[0].logprobs += chosen.pack(beams.search.params.width)
    end_if_searched(group)
    return True


def hold_back(group: Group) -> None:
    """Forget what has no place in swapped blocks: copies that were not made. What was sampled and
    not chosen from yet is computed again."""
    assert group.beams is not None
    group.beams.forget_results()
    for sequence in group.sequences:
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, sequence.num_tokens - 1)
