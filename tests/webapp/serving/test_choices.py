"""The models that the Chat page offers, and which two stand side by side."""

import pytest

from webapp.serving.choices import Choice, choose_pair

BASE = Choice(name="m1", label="base", base="")
OTHER = Choice(name="m2", label="other", base="")
NEW = Choice(name="j2", label="new", base="m1")
OLD = Choice(name="j1", label="old", base="m1")
ALL = [BASE, OTHER, NEW, OLD]


@pytest.mark.parametrize(
    ("wanted", "pair"),
    [
        ([], (BASE, NEW)),
        (["j1"], (BASE, OLD)),
        (["m1"], (BASE, NEW)),
        (["m2"], (OTHER, None)),
        (["m2", "j1"], (OTHER, OLD)),
        (["gone"], (BASE, NEW)),
    ],
)
def test_a_run_stands_beside_its_base(wanted: list[str], pair: tuple[Choice | None, Choice | None]) -> None:
    assert choose_pair(ALL, wanted=wanted) == pair


def test_with_one_model_or_none() -> None:
    assert choose_pair([BASE], wanted=[]) == (BASE, None)
    assert choose_pair([], wanted=[]) == (None, None)
