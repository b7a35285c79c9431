"""The first picture of the page Plans: points, the limit and the stretch that is shown."""

from typing import Any

from optimizer.base.units import GIB, MIB
from webapp.pages.pictures.plans import frontier_picture


def point(sort: str, mib: int, time_ms: float, *, letter: str = "") -> dict[str, Any]:
    return {"sort": sort, "letter": letter, "peak_bytes": mib * MIB, "time_ms": time_ms, "tokens_per_s": 1e6 / time_ms}


def facts(*points: dict[str, Any], fits_bytes: int = 150 * MIB, by: str = "time") -> dict[str, Any]:
    limits = {"fits_bytes": fits_bytes, "tight_bytes": fits_bytes + 10 * MIB}
    return {"by": by, "time_of": "a step" if by == "time" else "all prompts", "points": points, **limits}


NEAR = (
    point("chosen", 200, 400, letter="A"), point("frontier", 100, 600), point("frontier", 160, 450), point("frontier", 120, 500),
)  # fmt: skip


def test_the_limit_is_a_line_with_the_band_beyond_it_and_its_size() -> None:
    picture = frontier_picture(facts(*NEAR))
    assert [(band.x, band.width) for band in picture.bands] == [("50.0%", "8.3%")]
    assert "M500 0V1000" in [line.path for line in picture.lines]
    assert [(note.text, note.x, note.anchor) for note in picture.notes] == [("usable 150 MiB", "50.0%", "start")]


def test_a_limit_beyond_the_right_edge_is_an_arrow() -> None:
    picture = frontier_picture(facts(*NEAR, fits_bytes=8 * GIB))
    assert picture.bands == ()
    assert [line.name for line in picture.lines] == ["training"]
    assert [(note.text, note.x) for note in picture.notes] == [("usable 8.00 GiB ▸", "100%")]


def test_standard_setups_far_off_leave_room_for_the_others_unless_they_are_compared() -> None:
    far = point("baseline", 900, 300)
    assert "baseline" not in [mark.name for mark in frontier_picture(facts(*NEAR, far)).marks]
    compared = frontier_picture(facts(*NEAR, {**far, "letter": "B"}))
    assert [(mark.name, mark.letter) for mark in compared.marks if mark.letter] == [("baseline", "B"), ("chosen", "A")]
    assert compared.mark_labels[-1] == ("chosen", "recommended")


def test_the_frontier_goes_from_small_to_large_in_steps() -> None:
    (line,) = [line for line in frontier_picture(facts(*NEAR)).lines if line.name == "training"]
    assert line.path == "M83 267h167v333h333v167H583"


def test_generations_are_drawn_by_their_speed() -> None:
    picture = frontier_picture(facts(*NEAR, by="speed"))
    assert picture.y.title == "tokens per second"
    assert picture.summary.startswith("4 plans by peak and tokens per second; usable 150 MiB.")


def test_one_plan_alone_is_a_point_beneath_the_middle() -> None:
    (mark,) = frontier_picture(facts(point("chosen", 200, 400))).marks
    assert (mark.x, mark.y) == ("50.0%", "80.0%")


def test_the_name_of_the_limit_hides_no_plan() -> None:
    """It takes 18 pixels at the top of a plot that is 150 high on a telephone; a point and its letter take 22 more."""
    for by in ("time", "speed"):
        marks = frontier_picture(facts(*NEAR, by=by)).marks
        assert min(float(mark.y.rstrip("%")) for mark in marks) > 26
