"""Beam searches: what they may ask for, and their output. Pure; errors name the invalid field."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway_svc.generation.field_checks import out_of_range
from gateway_svc.generation.validation import MAX_LOGPROBS, GenerationRequest
from gateway_svc.scheduler.events import ChoiceEvent, Ended, Event, NewTokens
from gateway_svc.text import chat_messages
from quire.internal.v1 import gateway_pb2, scheduler_pb2
from quire.service.beams import (
    MAX_BEAM_WIDTH,
    MAX_CANDIDATES,
    BeamStep,
    Hypothesis,
    hypotheses_of,
    num_entries,
)
from quire.service.errors import invalid
from quire.v1 import beam_search_pb2, inference_pb2

_DEFAULT_WIDTH: Final = 4
_MAX_LENGTH_PENALTY: Final = 10.0
# Sampling parameters that a search has, too, or that concern the prompt or the text.
_SHARED: Final = {
    "max_tokens", "stop_token_ids", "ignore_eos", "skip_special_tokens", "n", "seed",
    "truncate_prompt_tokens", "detokenize", "speculation",
}  # fmt: skip
# Values of the others that change nothing.
_NEUTRAL: Final[Mapping[str, Any]] = {
    "temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "typical_p": 1, "presence_penalty": 0,
    "frequency_penalty": 0, "repetition_penalty": 1, "min_tokens": 0,
    "include_stop_str_in_output": False, "logprobs_mode": inference_pb2.LOGPROBS_MODE_RAW,
}  # fmt: skip


@dataclass(frozen=True)
class Search:
    """The parameters of a search, with every default filled in."""

    beam_width: int
    length_penalty: float
    early_stopping: scheduler_pb2.EarlyStopping.ValueType

    @classmethod
    def of(cls, params: beam_search_pb2.BeamSearchParams) -> "Search":
        """RequestError names the invalid field."""
        width = params.beam_width if params.HasField("beam_width") else _DEFAULT_WIDTH
        if not 1 <= width <= MAX_BEAM_WIDTH:
            raise out_of_range("params.beam_width", width, f"1 to {MAX_BEAM_WIDTH}")
        penalty = params.length_penalty if params.HasField("length_penalty") else 1.0
        most = _MAX_LENGTH_PENALTY
        if not -most <= penalty <= most:
            raise out_of_range("params.length_penalty", penalty, f"{-most:g} to {most:g}")
        stopping = params.early_stopping or beam_search_pb2.EARLY_STOPPING_HEURISTIC
        if stopping not in [int(value) for value in scheduler_pb2.EarlyStopping.values()]:
            raise out_of_range("params.early_stopping", stopping, "one of EarlyStopping")
        return cls(width, penalty, scheduler_pb2.EarlyStopping.ValueType(stopping))

    def state(self) -> gateway_pb2.SearchState:
        """What gives the output of the search, besides its steps."""
        return gateway_pb2.SearchState(
            beam_width=self.beam_width, length_penalty=self.length_penalty
        )


def generation_request(request: beam_search_pb2.BeamSearchRequest) -> inference_pb2.GenerateRequest:
    """A request of as many choices with the same prompt and options."""
    params, search = request.params, Search.of(request.params)
    generation = inference_pb2.GenerateRequest(
        sampling_params=inference_pb2.SamplingParams(
            max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            skip_special_tokens=(
                params.skip_special_tokens if params.HasField("skip_special_tokens") else None
            ),
            n=search.beam_width,
        )
    )
    for name in ("request_id", "model", "text", "cache_salt", "priority", "resume_window_s"):
        if request.HasField(name):
            setattr(generation, name, getattr(request, name))
    if request.HasField("token_ids"):
        generation.token_ids.CopyFrom(request.token_ids)
    elif request.HasField("conversation"):
        generation.conversation.CopyFrom(request.conversation)
    return generation


def check_request(request: GenerationRequest) -> None:
    """Refuse what a search does not have. Only requests over HTTP can have its parameters."""
    params = request.sampling_params
    for field, value in params.ListFields():
        name = field.name
        if name not in _SHARED and (name not in _NEUTRAL or value != _NEUTRAL[name]):
            raise invalid(
                f"sampling_params.{name}",
                "NOT_IN_BEAM_SEARCH",
                "is set, which a beam search does not have: leave it out, or sample without "
                "use_beam_search",
            )
    if chat_messages.offers_tools(request.conversation):
        raise invalid(
            "conversation.tools",
            "NOT_IN_BEAM_SEARCH",
            "is set; a beam search calls no tools: set tool_choice to none, or do without beams",
        )


def resolve(
    resolved: scheduler_pb2.ResolvedParams,
    params: inference_pb2.SamplingParams,
    search: Search,
    vocab_size: int,
) -> None:
    """Fill in the parameters of a search; the default of `max_tokens` is lowered to what its
    response may hold. RequestError if the client's do not fit the model."""
    width, num_stops = search.beam_width, len(resolved.stop_token_ids)
    most = min(MAX_CANDIDATES, vocab_size)
    if width + num_stops > most:
        raise invalid(
            "params.beam_width",
            "TOO_MANY_CANDIDATES",
            f"is {width}; with the {num_stops} stop tokens at most {most - num_stops} is allowed",
        )
    max_tokens = MAX_LOGPROBS // num_entries(width)
    if not params.HasField("max_tokens"):
        resolved.max_tokens = min(resolved.max_tokens, max_tokens)
    if resolved.max_tokens > max_tokens:
        raise invalid(
            "params.max_tokens",
            "TOO_MANY_TOKENS",
            f"is {resolved.max_tokens}; with {width} beams at most {max_tokens} is allowed",
        )
    resolved.temperature = 0.0
    resolved.num_logprobs = 1 + width + num_stops
    resolved.num_lookahead_tokens = 0
    resolved.without_drafts = True
    resolved.beam_width = width
    resolved.length_penalty = search.length_penalty
    resolved.early_stopping = search.early_stopping


class SearchOutput:
    """Collects the steps of a search; at its end they become the events of its sequences."""

    def __init__(self, state: gateway_pb2.ResumeState) -> None:
        self.hypotheses: list[Hypothesis] = []
        self._search = state.search
        self._stop_token_ids = frozenset(state.stop_token_ids)
        self._steps: list[BeamStep] = []

    def take(self, events: Iterable[Event]) -> list[Event]:
        """The events of the sequences, as if each was a choice; none before the end. The log of
        another length is the scheduler's fault, and a ValueError."""
        found: list[Event] = []
        for event in events:
            if isinstance(event, NewTokens):
                self._steps += [BeamStep.unpack(one.packed) for one in event.logprobs]
            elif isinstance(event, Ended):
                found += self._end(event)
            else:
                found.append(event)
        return found

    def _end(self, ended: Ended) -> list[ChoiceEvent]:
        search = self._search
        self.hypotheses = hypotheses_of(self._steps, search.beam_width, search.length_penalty)
        events: list[ChoiceEvent] = []
        for choice, hypothesis in enumerate(self.hypotheses):
            token_ids = tuple(hypothesis.token_ids)
            is_stop = token_ids[-1] in self._stop_token_ids
            events += [
                NewTokens(choice, 0, token_ids),
                Ended(
                    choice,
                    scheduler_pb2.END_REASON_STOP_TOKEN
                    if is_stop
                    else scheduler_pb2.END_REASON_LENGTH,
                    token_ids[-1] if is_stop else None,
                    len(token_ids),
                    ended.num_cached_prompt_tokens,
                ),
            ]
        return events
