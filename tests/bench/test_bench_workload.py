import itertools
import random
from statistics import fmean, median, pstdev

import pytest

from quire.bench.lengths import lengths
from quire.bench.workload import Workload, arrival_times, parse_arrival


def drawn(form: str, count: int = 4000) -> list[int]:
    distribution = lengths(form)
    rng = random.Random(7)
    return [distribution.draw(rng) for _ in range(count)]


def workload(**changes) -> Workload:
    values = {
        "num_requests": 50,
        "prompt_lengths": lengths("3-9"),
        "output_lengths": lengths("5"),
        "token_ids": range(10, 20),
        **changes,
    }
    return Workload(**values)


def test_a_single_number_is_a_fixed_length():
    assert set(drawn("128")) == {128}


def test_two_numbers_are_the_limits_of_a_uniform_distribution():
    assert set(drawn("3-6")) == {3, 4, 5, 6}


def test_normal_and_lognormal_lengths_have_their_parameters():
    normal = drawn("normal:200,20")
    assert fmean(normal) == pytest.approx(200, abs=2)
    assert pstdev(normal) == pytest.approx(20, abs=2)
    long_tailed = drawn("lognormal:100,1")
    assert median(long_tailed) == pytest.approx(100, rel=0.1)
    assert max(long_tailed) > 1000


def test_no_length_is_less_than_one():
    assert min(drawn("normal:1,50")) == 1


@pytest.mark.parametrize(
    "form", ["", "0", "9-3", "-4", "a", "normal:5", "normal:0,1", "normal:1.2.3,1", "zipf:1,2"]
)
def test_an_invalid_distribution_is_shown(form):
    with pytest.raises(ValueError, match=r"lengths: .*got") as caught:
        lengths(form)
    assert repr(form) in str(caught.value)


def test_only_equal_seeds_give_equal_requests():
    assert workload(seed=3).requests() == workload(seed=3).requests()
    assert workload(seed=3).requests() != workload(seed=4).requests()


def test_prompts_have_the_given_tokens_and_lengths():
    requests = workload().requests()
    assert {len(request.prompt_token_ids) for request in requests} == set(range(3, 10))
    assert {id_ for request in requests for id_ in request.prompt_token_ids} == set(range(10, 20))
    assert {request.max_tokens for request in requests} == {5}


def test_all_prompts_begin_with_the_shared_prefix():
    requests = workload(shared_prefix=8).requests()
    assert len({tuple(request.prompt_token_ids[:8]) for request in requests}) == 1
    assert {len(request.prompt_token_ids) for request in requests} == set(range(11, 18))


def test_requests_are_truncated_to_the_models_length():
    requests = workload(prompt_lengths=lengths("8-30"), max_model_len=12).requests()
    assert all(len(r.prompt_token_ids) + r.max_tokens <= 12 for r in requests)
    assert max(len(request.prompt_token_ids) for request in requests) == 11
    assert {r.max_tokens for r in requests if len(r.prompt_token_ids) == 11} == {1}


@pytest.mark.parametrize("changes", [{"num_requests": 0}, {"token_ids": range(0)}])
def test_an_empty_workload_is_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        workload(**changes)


def test_at_an_infinite_rate_all_arrive_at_once():
    assert arrival_times(3, float("inf"), "poisson") == [0.0, 0.0, 0.0]


def test_fixed_arrivals_have_equal_gaps():
    assert arrival_times(4, 2.0, "fixed") == [0.0, 0.5, 1.0, 1.5]


def test_poisson_arrivals_have_exponential_gaps_of_the_rate():
    times = arrival_times(4001, 10.0, "poisson", seed=1)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert min(gaps) >= 0
    assert fmean(gaps) == pytest.approx(0.1, rel=0.05)
    assert pstdev(gaps) == pytest.approx(0.1, rel=0.05)


def test_arrivals_follow_the_seed():
    assert arrival_times(9, 1.0, "poisson", 1) == arrival_times(9, 1.0, "poisson", 1)
    assert arrival_times(9, 1.0, "poisson", 1) != arrival_times(9, 1.0, "poisson", 2)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_is_above_zero(rate):
    with pytest.raises(ValueError, match="request rate"):
        arrival_times(3, rate, "fixed")


def test_an_unknown_arrival_is_shown():
    assert parse_arrival("fixed") == "fixed"
    with pytest.raises(ValueError, match="'uniform'"):
        parse_arrival("uniform")
