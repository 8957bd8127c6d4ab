"""The catalogue of requests, drawn from a seed."""

from benchmarks.chaos.mix import KINDS, catalogue


def test_a_seed_gives_the_same_requests():
    assert catalogue(5, 40) == catalogue(5, 40)
    assert catalogue(5, 40) != catalogue(6, 40)


def test_every_kind_is_drawn():
    requests = catalogue(1, len(KINDS))
    assert {request.kind for request in requests} == {kind.name for kind in KINDS}
    assert len(catalogue(1, 40)) == 40


def test_sampling_parameters_vary():
    requests = catalogue(2, 100)
    params = [request.params for request in requests]
    assert {0.0} < {one.temperature for one in params}
    assert {None, 4} == {one.n for one in params}
    assert any(one.stop for one in params)
    assert {None, 3} == {one.logprobs for one in params}
    assert any(one.logprobs and one.stop and one.n for one in params)
    assert len({one.seed for one in params}) == 100
    cancelled = [request for request in requests if request.cancel_after is not None]
    assert cancelled
    assert all(request.kind.startswith("cancelled") for request in cancelled)
    longest = max(one.max_tokens or 0 for one in params)
    assert min(one.max_tokens or 0 for one in params) < 24 < 160 < longest
