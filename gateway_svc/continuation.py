"""What makes text of a request's tokens, kept with the request: any gateway can go on with it."""

from collections.abc import Iterable, Sequence

from gateway_svc.choice import Choice
from gateway_svc.detokenizer import Detokenizer
from gateway_svc.prompts import Prompt
from gateway_svc.served_model import Model
from gateway_svc.validation import GenerationRequest
from quire.internal.v1 import gateway_pb2
from quire.service.errors import invalid


def state_of(
    request: GenerationRequest, model: Model, prompt: Prompt, stop_token_ids: Iterable[int]
) -> gateway_pb2.StreamState:
    """Of a checked request; `stop_token_ids` are all that end a choice."""
    params = request.sampling_params
    skip = params.skip_special_tokens or not params.HasField("skip_special_tokens")
    context = prompt.token_ids if prompt.is_continued else ()
    return gateway_pb2.StreamState(
        model=model.name,
        num_choices=params.n if params.HasField("n") else 1,
        num_prompt_tokens=len(prompt.token_ids),
        context_token_ids=Detokenizer.context_of(model.vocabulary, skip, context),
        stop=params.stop,
        stop_token_ids=stop_token_ids,
        skip_special_tokens=skip,
        resume_window_s=request.resume_window_s,
    )


def choices_of(
    state: gateway_pb2.StreamState, model: Model, next_indices: Sequence[int] = ()
) -> tuple[Choice, ...]:
    """By their indices; the client has the tokens before `next_indices`, none where absent.
    RequestError if there are more of these than choices.
    """
    if len(next_indices) > state.num_choices:
        raise invalid(
            "next_token_indices",
            "TOO_MANY_NEXT_TOKEN_INDICES",
            f"has {len(next_indices)} entries; the request has {state.num_choices} choices",
        )
    missing = state.num_choices - len(next_indices)
    stop_token_ids = frozenset(state.stop_token_ids)
    return tuple(
        Choice(index, _detokenizer(state, model), state.stop, stop_token_ids, next_index)
        for index, next_index in enumerate([*next_indices, *[0] * missing])
    )


def _detokenizer(state: gateway_pb2.StreamState, model: Model) -> Detokenizer:
    return Detokenizer(model.vocabulary, state.skip_special_tokens, state.context_token_ids)
