"""Stop strings against a naive search."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_svc.text.stop_strings import CheckedText, StopChecker


def naive(text: str, stops: list[str], num_exempt: int = 0) -> CheckedText:
    """Grow the text by a character until it ends with a stop string, the longest one first. None
    ends in the exempt characters at the beginning."""
    for end in range(num_exempt + 1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return CheckedText(text[: end - len(stop)], stop)
    return CheckedText(text)


@given(
    deltas=st.lists(st.text("ab日", max_size=4), max_size=12),
    stops=st.lists(st.text("ab日", min_size=1, max_size=4), max_size=4, unique=True),
)
@settings(max_examples=500, deadline=None)
def test_agrees_with_a_naive_search_for_every_split(deltas: list[str], stops: list[str]) -> None:
    checker = StopChecker(stops)
    expected = naive("".join(deltas), stops)
    sent, found = "", None
    for delta in deltas:
        checked = checker.push(delta)
        sent += checked.text
        assert expected.text.startswith(sent)
        if checked.stop is not None:
            found = checked.stop
            break
    assert CheckedText(sent + checker.flush(), found) == expected


@given(
    exempt=st.lists(st.text("ab日", max_size=4), max_size=6),
    deltas=st.lists(st.text("ab日", max_size=4), max_size=8),
    stops=st.lists(st.text("ab日", min_size=1, max_size=4), max_size=4, unique=True),
)
@settings(max_examples=500, deadline=None)
def test_no_stop_string_ends_in_a_text_that_may_not_stop(
    exempt: list[str], deltas: list[str], stops: list[str]
) -> None:
    """As in vLLM: one may begin in the text of the first `min_tokens` tokens and end later."""
    checker = StopChecker(stops)
    before = "".join(exempt)
    expected = naive(before + "".join(deltas), stops, len(before))
    sent, found = "", None
    for may_stop, delta in [*((False, text) for text in exempt), *((True, t) for t in deltas)]:
        checked = checker.push(delta, may_stop)
        sent += checked.text
        assert expected.text.startswith(sent)
        if checked.stop is not None:
            found = checked.stop
            break
    assert CheckedText(sent + checker.flush(), found) == expected


def test_a_possible_beginning_is_held_back() -> None:
    checker = StopChecker(["STOP"])
    assert checker.push("go ST") == CheckedText("go ")
    assert checker.push("A") == CheckedText("STA")
    assert checker.push("ST") == CheckedText("")
    assert checker.push("OP and more") == CheckedText("", "STOP")
    assert checker.flush() == ""


@pytest.mark.parametrize("cut", range(1, 4))
def test_the_first_complete_stop_string_is_found(cut: int) -> None:
    checker = StopChecker(["abc", "b"])
    first = checker.push("abc"[:cut])
    second = CheckedText("") if first.stop else checker.push("abc"[cut:])
    assert first.text + second.text == "a"
    assert first.stop or second.stop == "b"
