"""Prompts that are sent together, and their results in the order of the prompts."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from quire.client.errors import QuireError
from quire.client.outputs import RequestOutput
from quire.client.prompts import Prompt, several_prompts
from quire.client.requests import (
    RequestOptions,
    check_ids,
    fill_request,
    params_of_each,
    request_output,
)
from quire.client.sampling_params import SamplingParams
from quire.v1 import inference_pb2

# Called with each output or failure.
OnEnd: TypeAlias = Callable[[RequestOutput | Exception], object]


class PromptBatch:
    """Requests of prompts; `take` receives their responses in any order."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Sequence[SamplingParams | None],
        options: RequestOptions,
        return_exceptions: bool,
        on_end: OnEnd | None,
    ) -> None:
        """TypeError or ValueError for an invalid prompt, unless `return_exceptions`, and for
        arguments that are no lists of the same length."""
        prompts = several_prompts(prompts)
        each = params_of_each(sampling_params, len(prompts))
        check_ids(options, len(prompts))
        # Of all valid prompts.
        self.requests: list[inference_pb2.GenerateRequest] = []
        self._return_exceptions = return_exceptions
        self._on_end = on_end
        # Positions of the requests among the prompts.
        self._positions: list[int] = []
        self._results: dict[int, RequestOutput | Exception] = {}
        for position, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
            try:
                request = fill_request(inference_pb2.GenerateRequest(), prompt, params, options)
            except (TypeError, ValueError) as error:
                self._end(position, error)
            else:
                self.requests.append(request)
                self._positions.append(position)

    def take(self, index: int, result: inference_pb2.GenerateResponse | QuireError) -> None:
        """Record the response of a request, or its failure. Raises the failure unless failures are
        returned."""
        if isinstance(result, QuireError):
            self._end(self._positions[index], result)
        else:
            self._end(self._positions[index], request_output(self.requests[index], result))

    @property
    def results(self) -> list[RequestOutput | Exception]:
        """Outputs and failures of all prompts, in their order, once all have ended."""
        return [self._results[position] for position in range(len(self._results))]

    def _end(self, position: int, result: RequestOutput | Exception) -> None:
        if isinstance(result, Exception) and not self._return_exceptions:
            raise result
        self._results[position] = result
        if self._on_end is not None:
            self._on_end(result)
