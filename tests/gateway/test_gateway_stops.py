import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_svc.stops import Passed, StopFinder


def naive(text: str, stops: list[str]) -> Passed:
    """Grows the text by a character until it ends with a stop string, the longest one first."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return Passed(text[: end - len(stop)], stop)
    return Passed(text)


@given(
    deltas=st.lists(st.text("ab日", max_size=4), max_size=12),
    stops=st.lists(st.text("ab日", min_size=1, max_size=4), max_size=4, unique=True),
)
@settings(max_examples=500, deadline=None)
def test_agrees_with_a_naive_search_however_the_text_is_cut(
    deltas: list[str], stops: list[str]
) -> None:
    finder = StopFinder(stops)
    expected = naive("".join(deltas), stops)
    sent, found = "", None
    for delta in deltas:
        passed = finder.push(delta)
        sent += passed.text
        assert expected.text.startswith(sent)
        if passed.stop is not None:
            found = passed.stop
            break
    assert Passed(sent + finder.flush(), found) == expected


def test_a_beginning_is_held_back_until_it_is_decided() -> None:
    finder = StopFinder(["STOP"])
    assert finder.push("go ST") == Passed("go ")
    assert finder.push("A") == Passed("STA")
    assert finder.push("ST") == Passed("")
    assert finder.push("OP and more") == Passed("", "STOP")
    assert finder.flush() == ""


@pytest.mark.parametrize("cut", range(1, 4))
def test_what_is_complete_first_wins(cut: int) -> None:
    finder = StopFinder(["abc", "b"])
    first = finder.push("abc"[:cut])
    second = Passed("") if first.stop else finder.push("abc"[cut:])
    assert first.text + second.text == "a"
    assert first.stop or second.stop == "b"
