"""Errors of invalid submissions, which gateways refuse earlier."""

import math

from quire.internal.v1 import scheduler_pb2
from quire.service.beams import MAX_BEAM_WIDTH, MAX_CANDIDATES
from quire.service.errors import RequestError, invalid
from scheduler_svc.beams.search import EarlyStopping
from scheduler_svc.core.logprobs import MAX_NUM_LOGPROBS

MAX_CHOICES = 16

_Submission = scheduler_pb2.Submission


def num_choices(submission: _Submission) -> int:
    return submission.n if submission.HasField("n") else 1


def validation_error(submission: _Submission) -> RequestError | None:
    """The error of an invalid submission, which gateways refuse earlier; None if it is valid."""
    if not submission.prompt_token_ids:
        return invalid("prompt", "EMPTY_PROMPT", "has no tokens")
    if submission.params.max_tokens < 1:
        return _out_of_range("max_tokens", "must be at least 1")
    if not submission.params.temperature >= 0:
        return _out_of_range("temperature", "must be at least 0")
    if not 0 < submission.params.top_p <= 1:
        return _out_of_range("top_p", "must be above 0, at most 1")
    if not 0 <= submission.params.min_p <= 1:
        return _out_of_range("min_p", "must be 0 to 1")
    if not 1 <= num_choices(submission) <= MAX_CHOICES:
        return _out_of_range("n", f"is {submission.n}; must be 1 to {MAX_CHOICES}")
    if submission.params.beam_width:
        return _beam_error(submission)
    if submission.params.num_logprobs > MAX_NUM_LOGPROBS:
        return _out_of_range("logprobs", f"must be at most {MAX_NUM_LOGPROBS - 1}")
    if submission.params.num_prompt_logprobs > MAX_NUM_LOGPROBS:
        return _out_of_range("prompt_logprobs", f"must be at most {MAX_NUM_LOGPROBS - 1}")
    return None


def _beam_error(submission: _Submission) -> RequestError | None:
    params = submission.params
    if params.beam_width > MAX_BEAM_WIDTH:
        return _out_of_range("beam_width", f"must be 1 to {MAX_BEAM_WIDTH}")
    num_candidates = params.beam_width + len(params.stop_token_ids)
    if num_candidates > MAX_CANDIDATES:
        return _out_of_range("stop_token_ids", f"must be at most {MAX_CANDIDATES} with the beams")
    expected = (num_candidates + 1, 0, 1)
    if (params.num_logprobs, params.num_prompt_logprobs, num_choices(submission)) != expected:
        return _out_of_range("logprobs", "must be those of the candidates, of one choice")
    if not math.isfinite(params.length_penalty):
        return _out_of_range("length_penalty", "must be finite")
    if params.early_stopping not in [int(value) for value in EarlyStopping]:
        return _out_of_range("early_stopping", "must be one of its values")
    return None


def _out_of_range(param: str, message: str) -> RequestError:
    return invalid(f"sampling_params.{param}", f"{param.upper()}_OUT_OF_RANGE", message)
