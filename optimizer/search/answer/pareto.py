"""Plans of which no other is both smaller and faster: picked out of priced ones, and few enough to draw."""

from collections.abc import Iterable
from typing import Final

from optimizer.search.budgeted import PlanT, PredictionT

MAX_POINTS: Final = 24


def pick_frontier(
    ordered: Iterable[tuple[PlanT, PredictionT]], *, best: PlanT | None
) -> list[tuple[PlanT, PredictionT]]:
    """From small to fast, at most MAX_POINTS; both ends are kept, and the best plan where it is among them.

    ordered: the fastest first.
    """
    points: list[tuple[PlanT, PredictionT]] = []
    for plan, prediction in ordered:
        if not points or prediction.device_peak_high_bytes < points[-1][1].device_peak_high_bytes:
            points.append((plan, prediction))
    points.reverse()
    plans = [plan for plan, _ in points]
    return _thinned(points, kept=plans.index(best) if best is not None and best in plans else 0)


def _thinned(points: list[tuple[PlanT, PredictionT]], *, kept: int) -> list[tuple[PlanT, PredictionT]]:
    if len(points) <= MAX_POINTS:
        return points
    indexes = {index * (len(points) - 1) // (MAX_POINTS - 2) for index in range(MAX_POINTS - 1)} | {kept}
    return [points[index] for index in sorted(indexes)]
