"""CUDA graphs of ranks: they contain the exchanges, so all ranks need the same ones."""

from collections.abc import Callable

from worker_svc.errors import WrongSettingError
from worker_svc.gpu.graphs import Capturer, CudaCapturer, Replay, first_cause


class RequiredCapturer:
    """Ends the start of a rank that cannot capture a graph, and so that of the worker. It cannot go
    on without graphs, as a worker of one rank does: others have theirs, or wait for this one in the
    pass that has failed here."""

    def __init__(self, capturer: Capturer) -> None:
        self._capturer = capturer

    def capture(self, function: Callable[[], object]) -> Replay:
        """As `Capturer.capture`, but WrongSettingError if that fails."""
        try:
            return self._capturer.capture(function)
        except RuntimeError as error:
            raise WrongSettingError(
                f"a CUDA graph with exchanges between ranks cannot be captured: "
                f"{first_cause(error)}; set --enforce-eager on all ranks"
            ) from error


def rank_capturer() -> Capturer:
    """That of a rank on a GPU."""
    # Threads of NCCL look at events meanwhile.
    return RequiredCapturer(CudaCapturer("thread_local"))
