"""Shares of broad tests: together they are all cases of a broad test, each once, and a narrow one has a case in each."""

import argparse

import pytest

from tests.breadth import claim_of, left_to_others, read_share

BROAD = {f"test_bits.py::test_every_plan[{number}]": "every plan" for number in range(10)}
NARROW = {f"test_bits.py::test_both[{side}]": "both" for side in ("left", "right")}


def test_shares_have_every_case_once() -> None:
    had = [set(BROAD) - left_to_others(BROAD, share=share, count=4) for share in range(4)]
    assert set().union(*had) == set(BROAD)
    assert sum(map(len, had)) == len(BROAD)


def test_a_test_with_fewer_cases_than_shares_has_one_in_each() -> None:
    had = [set(NARROW) - left_to_others(NARROW, share=share, count=4) for share in range(4)]
    left, right = NARROW
    assert had == [{left}, {right}, {left}, {right}]


def test_one_share_of_one_leaves_nothing() -> None:
    assert left_to_others(BROAD | NARROW, share=0, count=1) == set()


@pytest.mark.parametrize("text", ["4/4", "1", "a/4", "-1/4", "0/0"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no share; allowed: 0/1 for all"):
        read_share(text)


def test_a_case_shows_its_own_tests_claim_or_the_one_that_its_mark_names() -> None:
    assert claim_of("test_bits.py::test_both[left]", pytest.mark.breadth.mark) == "test_bits.py::test_both"
    assert claim_of("test_bits.py::test_both[left]", pytest.mark.breadth("two devices").mark) == "two devices"
