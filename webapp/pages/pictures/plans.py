"""First picture of the page Plans: each plan by device memory and by time or speed, with the limit that verdicts go by.

Drawn from the same facts as ``static/js/plans.js``, over the same stretch: the plans worth looking at, with a tenth of air, and
more at the top.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from optimizer.base.units import GIB, MIB, format_bytes
from webapp.pages.pictures.picture import Axis, Band, Line, Mark, Note, Picture, step_path

Point = Mapping[str, Any]
_LABELS: Final = {"frontier": "frontier", "baseline": "standard setups", "chosen": "recommended", "yours": "yours"}
"""Sorts of points in the legend; what comes later is drawn over what comes before."""
_ORDER: Final = tuple(_LABELS)
_AIR_ABOVE: Final = 0.4
"""Share of the upright stretch over the highest plan, where the name of the limit and letters of plans stand."""


def frontier_picture(facts: Mapping[str, Any]) -> Picture:
    """facts: what ``webapp.pages.shown.plans.chart_facts`` makes, with one point at least."""
    is_speed = facts["by"] == "speed"
    points: Sequence[Point] = facts["points"]
    near = [point for point in points if point["sort"] != "baseline" or point["letter"]]
    shown = near if len(near) > 1 else points
    largest_bytes = max(point["peak_bytes"] for point in points)
    unit = GIB if largest_bytes >= 2 * GIB else MIB
    x_low, x_high = _span([point["peak_bytes"] for point in shown])
    y_low, y_high = _span([_worth(point, is_speed=is_speed) for point in shown], above=_AIR_ABOVE)
    name = "GiB" if unit == GIB else "MiB"
    x = Axis(low=x_low, high=x_high, unit=unit, title=f"device memory at the peak, {name}")
    y = Axis(
        low=y_low,
        high=y_high,
        is_upright=True,
        title="tokens per second" if is_speed else f"seconds for {facts['time_of']}",
    )
    inside = [
        (point["peak_bytes"], _worth(point, is_speed=is_speed), point)
        for point in sorted(points, key=lambda point: _ORDER.index(point["sort"]))
        if x_low <= point["peak_bytes"] <= x_high and y_low <= _worth(point, is_speed=is_speed) <= y_high
    ]
    frontier = sorted((num_bytes, worth) for num_bytes, worth, point in inside if point["sort"] == "frontier")
    limit_bytes, may_bytes = facts["fits_bytes"], facts["tight_bytes"]
    is_beyond = limit_bytes > x_high
    limit = x.percent(limit_bytes)
    return Picture(
        name="frontier",
        summary=_summary(facts, is_speed=is_speed),
        x=x,
        y=y,
        bands=() if is_beyond else (_band(x, limit_bytes, may_bytes),),
        lines=(
            *([Line(name="training", path=step_path(frontier, x=x, y=y))] if len(frontier) > 1 else []),
            *([] if is_beyond else [Line(name="budget", path=f"M{x.place(limit_bytes)} 0V1000")]),
        ),
        marks=tuple(
            Mark(name=point["sort"], x=x.percent(num_bytes), y=y.percent(worth), letter=point["letter"])
            for num_bytes, worth, point in inside
        ),
        notes=(
            Note(
                text=f"usable {format_bytes(limit_bytes)}{' ▸' if is_beyond else ''}",
                x="100%" if is_beyond else limit,
                y="0.0%",
                anchor="end" if is_beyond else "start",
                is_at_top=True,
            ),
        ),
        mark_labels=tuple((sort, label) for sort, label in _LABELS.items() if any(point["sort"] == sort for *_, point in inside)),
    )


def _worth(point: Point, *, is_speed: bool) -> float:
    """Upwards: tokens per second of a generation, seconds of a step."""
    return float(point["tokens_per_s"] if is_speed else point["time_ms"] / 1000)


def _span(values: Sequence[float], *, above: float = 0.1) -> tuple[float, float]:
    """above: share of the stretch between the values that is left free over them."""
    low, high = min(values), max(values)
    stretch = high - low or high or 1
    return max(0.0, low - 0.1 * stretch), high + above * stretch


def _band(x: Axis, begin: float, end: float) -> Band:
    return Band(name="tight", x=x.percent(begin), width=f"{(x.place(end) - x.place(begin)) / 1000:.1%}")


def _summary(facts: Mapping[str, Any], *, is_speed: bool) -> str:
    num_points = len(facts["points"])
    against = "tokens per second" if is_speed else f"the time of {facts['time_of']}"
    words = f"{num_points} plan{'' if num_points == 1 else 's'} by peak and {against}"
    return f"{words}; usable {format_bytes(facts['fits_bytes'])}. The table of every plan has the numbers."
