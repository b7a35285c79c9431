"""Charts as a template writes them: axes with round numbers, lines, stacked areas and marks, without a style or a script.

A path runs through whole numbers from 0 to ``SIDE`` on both axes, downwards, and is stretched to its box by the browser; places
of texts and marks are percentages of the box. Nothing here knows what is drawn.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

SIDE: Final = 1000
Spot = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Tick:
    """One number written along an axis."""

    at: str
    """Percent of the box, from the left or from the top."""
    label: str


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A linear scale from ``low`` to ``high``; an upright one begins at the bottom."""

    low: float
    high: float
    title: str = ""
    unit: float = 1.0
    """Labels count in these."""
    is_upright: bool = False
    num_steps: int = 5
    """Aimed at; there are at most one more than so many ticks."""
    has_ticks: bool = True
    is_scientific: bool = False
    """Labels as ``3e-4`` rather than ``0.0003``."""

    def place(self, value: float) -> int:
        """Whole thousandths of the box from its left or top edge; what lies outside is drawn at the edge."""
        share = min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))
        return round(SIDE * (1 - share if self.is_upright else share))

    def percent(self, value: float) -> str:
        return f"{self.place(value) / SIDE:.1%}"

    @property
    def ticks(self) -> tuple[Tick, ...]:
        if not self.has_ticks:
            return ()
        low, high = self.low / self.unit, self.high / self.unit
        step = round_step((high - low) / self.num_steps)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return tuple(
            Tick(at=self.percent(number * step * self.unit), label=self._label(number * step, step))
            for number in range(first, last + 1)
        )

    def _label(self, value: float, step: float) -> str:
        if self.is_scientific:
            mantissa, exponent = f"{value:.1e}".split("e")
            return f"{mantissa.removesuffix('.0')}e{int(exponent)}" if value else "0"
        return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def round_step(least: float) -> float:
    """Smallest of 1, 2 and 5 times a power of ten that is at least ``least``."""
    power: float = 10.0 ** math.floor(math.log10(least))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= least * (1 - 1e-9))


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve; ``name`` is its class in the style sheet and, where ``label`` is set, its line of the legend."""

    name: str
    path: str
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Area:
    """A category from the bottom of the box up to its upper edge; those behind it come before it."""

    category: str
    path: str


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A point of the size of text, wherever it lies."""

    name: str
    x: str
    y: str
    letter: str = ""


@dataclass(frozen=True, kw_only=True)
class Note:
    """A word beside a line: the budget's, the limit's."""

    text: str
    x: str
    y: str
    anchor: Literal["start", "end"] = "end"
    is_at_top: bool = False
    """Below its place rather than above."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """A stretch of the horizontal axis."""

    name: str
    x: str
    width: str


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One chart. Bands lie behind areas, areas behind lines, lines behind marks."""

    name: str
    """Prefix of the ids in the page."""
    summary: str
    """The whole chart in a sentence, for those who do not see it."""
    x: Axis
    y: Axis
    right: Axis | None = None
    bands: tuple[Band, ...] = ()
    areas: tuple[Area, ...] = ()
    lines: tuple[Line, ...] = ()
    marks: tuple[Mark, ...] = ()
    notes: tuple[Note, ...] = ()
    mark_labels: tuple[tuple[str, str], ...] = ()
    """Marks by name in the legend, after the lines that have a label."""

    @property
    def line_labels(self) -> tuple[tuple[str, str], ...]:
        return tuple((line.name, line.label) for line in self.lines if line.label)


def line_path(points: Iterable[tuple[float, float]], *, x: Axis, y: Axis) -> str:
    """Straight from point to point; empty for fewer than two."""
    spots = _thin_flat([(x.place(along), y.place(value)) for along, value in points])
    return _begin(spots) + _slopes(spots) if len(spots) > 1 else ""


def step_path(points: Iterable[tuple[float, float]], *, x: Axis, y: Axis) -> str:
    """Each value holds until the next point."""
    spots = [(x.place(along), y.place(value)) for along, value in points]
    return _begin(spots) + _stairs(spots) if len(spots) > 1 else ""


def area_path(points: Iterable[tuple[float, float]], *, x: Axis, y: Axis, is_stepped: bool) -> str:
    """The same curves, closed along the bottom of the box."""
    spots = [(x.place(along), y.place(value)) for along, value in points]
    if len(spots) < 2:
        return ""
    first, last = spots[0], spots[-1]
    edge = _stairs(spots) if is_stepped else _slopes(_thin_flat(spots))
    return f"M{first[0]} {SIDE}V{first[1]}{edge}V{SIDE}Z" if last != first else ""


def _begin(spots: Sequence[Spot]) -> str:
    return f"M{spots[0][0]} {spots[0][1]}"


def _slopes(spots: Sequence[Spot]) -> str:
    steps = [f"{here[0] - before[0]} {here[1] - before[1]}" for before, here in pairwise(spots)]
    return f"l{' '.join(steps)}" if steps else ""


def _stairs(spots: Sequence[Spot]) -> str:
    """Runs of equal height are one stretch."""
    path = []
    begin = spots[0][0]
    for before, here in pairwise(spots):
        if here[1] != before[1]:
            path.append(f"h{here[0] - begin}v{here[1] - before[1]}")
            begin = here[0]
    return "".join([*path, f"H{spots[-1][0]}"])


def _thin_flat(spots: Sequence[Spot]) -> list[Spot]:
    """Without the points that lie between two of the same height."""
    inner = [
        here
        for before, here, after in zip(spots, spots[1:], spots[2:], strict=False)
        if not before[1] == here[1] == after[1]
    ]
    return [*spots[:1], *inner, *spots[1:][-1:]]
