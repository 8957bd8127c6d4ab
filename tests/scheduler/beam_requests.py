"""Beam searches on simulated workers: what they are to give, computed one beam at a time."""

import struct
from dataclasses import dataclass
from functools import cache

import numpy as np
from checking_worker import VOCAB_SIZE, CheckingWorker, token_at
from faulty_sim_runner import seeds_after
from scheduler_stack import Gateway, Received, ReceivedChoice

from quire.internal.v1 import scheduler_pb2
from scheduler_svc.beams.search import BeamSearch, EarlyStopping, SearchParams
from worker_svc.sim.sampling import logprobs_at


def beam_worker(incarnation: int = 1, **model: int) -> CheckingWorker:
    return CheckingWorker(incarnation, token_logprobs=True, **model)


def candidates_at(
    seed: int, position: int, last: int | None, count: int
) -> list[tuple[int, float]]:
    """The most likely tokens at a position, after the token `last` if they depend on it."""
    seeds = np.array([seed], np.uint64)
    if last is not None:
        seeds = seeds_after(seeds, np.array([last], np.int32))
    sampled = np.array([token_at(seed, position)])
    token_ids, logprobs, _ = logprobs_at(seeds, np.array([position]), sampled, count, VOCAB_SIZE)
    return list(zip(token_ids[0, 1:].tolist(), logprobs[0, 1:].tolist(), strict=True))


@cache
def expected_search(
    seed: int, prompt: tuple[int, ...], params: SearchParams, by_token: bool
) -> BeamSearch:
    """A search whose beams are computed one by one."""
    search = BeamSearch(params)
    count = params.width + len(params.stop_token_ids)
    while not search.is_done:
        paths = [(*prompt, *search.path(beam)) for beam in range(search.num_running)]
        search.advance(
            [
                candidates_at(seed, len(path), path[-1] if by_token else None, count)
                for path in paths
            ]
        )
    return search


@dataclass
class ReceivedSearch(Received):
    """A submitted search, and what its gateway has received of its log."""

    # Candidates depend on the last token.
    by_token: bool = True

    @property
    def search(self) -> BeamSearch:
        params = self.submission.params
        wanted = SearchParams(
            params.beam_width,
            params.max_tokens,
            params.length_penalty,
            EarlyStopping(params.early_stopping),
            frozenset(params.stop_token_ids),
        )
        prompt = tuple(self.submission.prompt_token_ids)
        return expected_search(self.seed, prompt, wanted, self.by_token)

    def entries(self, choice: int, index: int) -> list[tuple[int, float, int]]:
        packed = self.search.steps[index].pack(self.submission.params.beam_width)
        return list(struct.iter_unpack("<IfI", packed))

    def output(self, choice: int = 0) -> list[int]:
        return [step.token_id for step in self.search.steps]


async def submit_search(
    gateway: Gateway,
    prompt: list[int],
    width: int = 4,
    max_tokens: int = 12,
    seed: int = 1,
    stop_token_ids: tuple[int, ...] = (),
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC,
    by_token: bool = True,
    **fields: object,
) -> int:
    """Submit a search; `fields` are other fields of the submission. Its attachment."""
    fields.setdefault("request_id", f"search-{gateway._next}")
    fields.setdefault("digest", repr((prompt, width, max_tokens, seed)).encode())
    submission = scheduler_pb2.Submission(
        prompt_token_ids=prompt,
        params=scheduler_pb2.ResolvedParams(
            top_p=1,
            seed=seed,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            num_logprobs=1 + width + len(stop_token_ids),
            without_drafts=True,
            beam_width=width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        ),
        **fields,
    )
    return await gateway._submit(ReceivedSearch(submission, [ReceivedChoice()], by_token=by_token))


def likely_stop(prompt: list[int], width: int, seed: int, step: int = 4) -> int:
    """A token that a beam of a search without stop tokens has at this step."""
    params = SearchParams(width, step + 1, 1.0, EarlyStopping.HEURISTIC, frozenset())
    search = BeamSearch(params)
    while len(search.steps) < step:
        paths = [(*prompt, *search.path(beam)) for beam in range(search.num_running)]
        search.advance([candidates_at(seed, len(path), path[-1], width) for path in paths])
    return search.path(0)[-1]
