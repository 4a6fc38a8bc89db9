"""Fault 81: stop strings across the borders of pieces."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launcher.stop_strings import StopStringMatcher


def cut(text: str, stops: tuple[str, ...], include_stop: bool) -> str:
    """The oracle: grow the text by characters until some stop string ends it."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[:end] if include_stop else text[: end - len(longest)]
    return text


def stream(pieces: list[str], stops: tuple[str, ...], include_stop: bool = False) -> str:
    matcher = StopStringMatcher(stops, include_stop=include_stop)
    shown = "".join(matcher.push(piece) for piece in pieces)
    return shown + matcher.flush()


def splits(text: str) -> list[list[str]]:
    """Every way to cut a text into pieces."""
    ways = []
    for borders in product([False, True], repeat=max(len(text) - 1, 0)):
        pieces, start = [], 0
        for position, border in enumerate(borders, start=1):
            if border:
                pieces.append(text[start:position])
                start = position
        ways.append([*pieces, text[start:]])
    return ways


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("ab<STOP>cd", ("<STOP>",)),
        ("aaab<S>", ("aab", "ab")),
        ("abcd", ("abcd", "bc")),
        ("aaaa", ("aa",)),
        ("<S<STOP>", ("<STOP>",)),
        ("<STOP>", ("<STOP>",)),
        ("never <STO", ("<STOP>",)),
        ("", ("x",)),
        ("no stops", ()),
    ],
)
def test_every_split_gives_the_cut_text(
    text: str, stops: tuple[str, ...], include_stop: bool
) -> None:
    expected = cut(text, stops, include_stop)
    for pieces in splits(text):
        assert stream(pieces, stops, include_stop) == expected, pieces


@given(
    st.lists(st.text("ab<", max_size=4), max_size=8),
    st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3).map(tuple),
    st.booleans(),
)
def test_any_split_of_any_text(
    pieces: list[str], stops: tuple[str, ...], include_stop: bool
) -> None:
    assert stream(pieces, stops, include_stop) == cut("".join(pieces), stops, include_stop)


def test_only_a_possible_beginning_is_held_back() -> None:
    matcher = StopStringMatcher(("<STOP>",))
    assert matcher.push("hello <") == "hello "
    assert matcher.push("S") == ""
    assert matcher.push("x") == "<Sx"


def test_nothing_comes_after_a_match() -> None:
    matcher = StopStringMatcher(("b",))
    assert matcher.push("abc") == "a"
    assert matcher.matched == "b"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""
