"""Bytes over the time of one step, cut down to what a chart can show."""

import time
from collections.abc import Iterable, Sequence

from optimizer.base.categories import CATEGORIES

MAX_TIMELINE_POINTS = 200

TimelinePoint = tuple[float, dict[str, int]]
"""``(offset_ms, bytes by category)``, categories without bytes left out."""


def cut_timeline(
    events: Iterable[tuple[float, int, int]], *, start_s: float, levels: Sequence[int], max_points: int
) -> list[TimelinePoint]:
    """The time until now is cut in equal windows; of each the highest moment stands, so the peak is always among them.

    events: ``(time_s, slot, delta_bytes)`` in order; slots from ``len(levels)`` on are of other tiers and passed over.
    levels: bytes by category at ``start_s``.
    """
    end_ms = (time.perf_counter() - start_s) * 1000
    current = list(levels)
    num_windows = max(1, max_points - 2)
    points = [_point(0.0, current)]
    best: tuple[int, float, list[int]] | None = None
    window = 0
    for time_s, slot, delta_bytes in events:
        if slot >= len(current):
            continue
        offset_ms = (time_s - start_s) * 1000
        this_window = min(num_windows - 1, int(offset_ms / end_ms * num_windows))
        if best is not None and this_window != window:
            points.append(_point(best[1], best[2]))
            best = None
        window = this_window
        current[slot] += delta_bytes
        total_bytes = sum(current)
        if best is None or total_bytes > best[0]:
            best = (total_bytes, offset_ms, current[:])
    if best is not None:
        points.append(_point(best[1], best[2]))
    points.append(_point(end_ms, current))
    return points


def _point(offset_ms: float, by_slot: Sequence[int]) -> TimelinePoint:
    return (round(offset_ms, 3), {name: size for name, size in zip(CATEGORIES, by_slot, strict=True) if size})
