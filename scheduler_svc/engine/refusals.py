"""Errors of requests that cannot run, or not now."""

from collections.abc import Collection, Iterable

from grpc import StatusCode

from quire.service.errors import RequestError, failed, invalid
from scheduler_svc.core.block_fit import blocks_for, fit_of_prompt
from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.view import BlockFit
from scheduler_svc.lane.lane import Lane

RETRY_WHEN_FULL_S = 1.0


def prompt_error(
    num_tokens: int, max_model_len: int, lanes: Collection[Lane]
) -> RequestError | None:
    """The error of a prompt that no lane can ever run; None if one can. There is at least one."""
    if num_tokens >= max_model_len:
        return invalid(
            "prompt",
            "PROMPT_TOO_LONG",
            # In OpenAI's words, as the gateway refuses it.
            f"has {num_tokens} tokens. This model's maximum context length is {max_model_len} "
            f"tokens, at most {max_model_len - 1} of the prompt",
        )
    lane = max(lanes, key=lambda lane: lane.num_admissible_blocks)
    num_usable_blocks = lane.worker.num_blocks - 1
    if fit_of_prompt(num_tokens, lane.limits, num_usable_blocks) is BlockFit.NEVER:
        return invalid(
            "prompt",
            "PROMPT_TOO_LONG",
            f"needs {blocks_for(num_tokens, lane.limits.block_size)} blocks of the cache; "
            f"the largest one has {lane.num_admissible_blocks} for new requests",
        )
    return None


def width_error(sequence: Sequence, lanes: Iterable[Lane]) -> RequestError | None:
    """The error of a search with more beams than any worker has rows."""
    width = sequence.group.params.beam_width
    if not width or width <= (most := max(lane.limits.max_num_seqs for lane in lanes)):
        return None
    return invalid(
        "params.beam_width",
        "BEAM_WIDTH_OUT_OF_RANGE",
        f"is {width}; a worker runs at most {most} beams at once (`--max-num-seqs`)",
    )


def overload_error(
    waiting: WaitingQueue, num_requests: int, num_tokens: int, most: tuple[int, int]
) -> RequestError | None:
    """The error if the queue has no room for `num_requests` more with `num_tokens` in all. `most`:
    the requests and tokens that it may have."""
    max_requests, max_tokens = most
    if len(waiting) + num_requests > max_requests:
        return _full(f"{len(waiting)} requests are queued; the limit is {max_requests}")
    if waiting and waiting.num_tokens + num_tokens > max_tokens:
        return _full(f"{waiting.num_tokens} tokens are queued; the limit is {max_tokens}")
    return None


def cancelled() -> RequestError:
    """The error of a request whose client has cancelled it."""
    return failed(StatusCode.CANCELLED, "CANCELLED", "the request was cancelled")


def _full(message: str) -> RequestError:
    return failed(StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", message, RETRY_WHEN_FULL_S)
