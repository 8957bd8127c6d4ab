"""Requests are drawn from a seed."""

from benchmarks.chaos.mix import KINDS, catalogue


def test_a_seed_gives_the_same_requests():
    assert catalogue(5, 40) == catalogue(5, 40)
    assert catalogue(5, 40) != catalogue(6, 40)


def test_every_kind_is_among_them():
    asks = catalogue(1, len(KINDS))
    assert {ask.kind for ask in asks} == {kind.name for kind in KINDS}
    assert len(catalogue(1, 40)) == 40


def test_they_differ_in_what_they_ask_for():
    asks = catalogue(2, 100)
    params = [ask.params for ask in asks]
    assert {0.0} < {one.temperature for one in params}
    assert {None, 4} == {one.n for one in params}
    assert any(one.stop for one in params)
    assert {None, 3} == {one.logprobs for one in params}
    assert any(one.logprobs and one.stop and one.n for one in params)
    assert len({one.seed for one in params}) == 100
    leaving = [ask for ask in asks if ask.leaves_after is not None]
    assert leaving
    assert all(ask.kind.startswith("leaving") for ask in leaving)
    longest = max(one.max_tokens or 0 for one in params)
    assert min(one.max_tokens or 0 for one in params) < 24 < 160 < longest
