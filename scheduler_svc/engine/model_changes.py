"""What a change of the workers' model means for a request that waits."""

from quire.service.errors import RequestError, unavailable
from scheduler_svc.core.sequence import Group


def forget_model(group: Group, is_other: bool) -> RequestError | None:
    """Drop what depends on the size of blocks, and with another model what it has computed. Return
    the error of a request that has output, which another model would continue."""
    if is_other and any(sequence.num_output_tokens for sequence in group.sequences):
        return unavailable("MODEL_CHANGED", "the workers serve another model")
    for sequence in group.sequences:
        sequence.chain = None
        if is_other:
            sequence.prompt_logprobs.clear()
    return None
