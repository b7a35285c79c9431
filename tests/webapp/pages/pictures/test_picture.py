"""Axes and paths of the pictures that the server draws: whole numbers in a box of a thousand, downwards."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from webapp.pages.pictures.picture import SIDE, Axis, area_path, line_path, round_step, step_path

X = Axis(low=0, high=10)
Y = Axis(low=0, high=100, is_upright=True)


def corners(path: str) -> list[tuple[int, int]]:
    """Points that a path of M, l, h, v, H, V and Z goes through."""
    along, down = 0, 0
    found = []
    for command, text in re.findall(r"([MlhvHV])([-\d ]+)", path):
        numbers = [int(number) for number in text.split()]
        steps = list(zip(numbers[::2], numbers[1::2], strict=True)) if command in "Ml" else [(numbers[0], numbers[0])]
        for across, downwards in steps:
            along = {"M": across, "H": across, "l": along + across, "h": along + across}.get(command, along)
            down = {"M": downwards, "V": downwards, "l": down + downwards, "v": down + downwards}.get(command, down)
            found.append((along, down))
    return found


@pytest.mark.parametrize(
    ("least", "step"), [(0.9, 1), (1, 1), (1.1, 2), (2.1, 5), (6, 10), (0.013, 0.02), (1e-4, 1e-4)]
)
def test_a_step_is_one_two_or_five_times_a_power_of_ten(least: float, step: float) -> None:
    assert round_step(least) == pytest.approx(step)


def test_ticks_are_round_and_lie_inside() -> None:
    ticks = Axis(low=0, high=448, is_upright=True).ticks
    assert [tick.label for tick in ticks] == ["0", "100", "200", "300", "400"]
    assert [tick.at for tick in ticks[:2]] == ["100.0%", "77.7%"]


def test_labels_count_in_the_unit_and_have_the_digits_that_tell_them_apart() -> None:
    assert [tick.label for tick in Axis(low=0, high=3 * 2**30, unit=2**30).ticks] == ["0", "1", "2", "3"]
    assert [tick.label for tick in Axis(low=2.41, high=2.49).ticks] == ["2.42", "2.44", "2.46", "2.48"]
    assert [tick.label for tick in Axis(low=0, high=3e-4, is_scientific=True, num_steps=3).ticks] == [
        "0",
        "1e-4",
        "2e-4",
        "3e-4",
    ]
    assert [tick.label for tick in Axis(low=0, high=20_000, num_steps=2).ticks] == ["0", "10,000", "20,000"]


@given(low=st.floats(-1e9, 1e9), length=st.floats(1e-3, 1e12), is_upright=st.booleans())
def test_any_range_has_some_ticks_and_not_many(low: float, length: float, is_upright: bool) -> None:
    ticks = Axis(low=low, high=low + length, is_upright=is_upright).ticks
    assert 2 <= len(ticks) <= 7
    assert all(0 <= float(tick.at.removesuffix("%")) <= 100 for tick in ticks)


def test_a_line_goes_straight_from_point_to_point() -> None:
    assert line_path([(0, 0), (5, 50), (10, 0)], x=X, y=Y) == "M0 1000l500 -500 500 500"


def test_a_flat_stretch_of_a_line_is_one_segment() -> None:
    assert line_path([(step, 40) for step in range(11)], x=X, y=Y) == "M0 600l1000 0"


def test_a_step_holds_until_the_next_point() -> None:
    assert corners(step_path([(0, 10), (4, 30), (6, 30), (10, 20)], x=X, y=Y)) == [
        (0, 900), (400, 900), (400, 700), (1000, 700), (1000, 800), (1000, 800),
    ]  # fmt: skip


@pytest.mark.parametrize("is_stepped", [True, False])
def test_an_area_begins_and_ends_at_the_bottom(is_stepped: bool) -> None:
    path = area_path([(0, 10), (5, 30), (10, 20)], x=X, y=Y, is_stepped=is_stepped)
    found = corners(path)
    assert (found[0], found[-1]) == ((0, SIDE), (SIDE, SIDE))
    assert path.endswith("Z")


@pytest.mark.parametrize("points", [[], [(1, 2)]])
def test_fewer_than_two_points_are_no_curve(points: list[tuple[float, float]]) -> None:
    assert (
        line_path(points, x=X, y=Y) == step_path(points, x=X, y=Y) == area_path(points, x=X, y=Y, is_stepped=True) == ""
    )


@given(st.lists(st.tuples(st.floats(-20, 20), st.floats(-200, 200)), min_size=2, max_size=50).map(sorted))
def test_a_curve_stays_in_its_box(points: list[tuple[float, float]]) -> None:
    for path in (line_path(points, x=X, y=Y), step_path(points, x=X, y=Y)):
        assert all(0 <= along <= SIDE and 0 <= down <= SIDE for along, down in corners(path))
