"""The arithmetic of the sweep: budgets, which baselines a plan is raced against, ratios, and what they come to. No tensors."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.common.record import GoalEntry, Row, goal
from benchmarks.search.rivals.contenders import FULL, PLAIN

BEHIND_GOAL = 1.03
WON_BACK_GOAL = 0.60
BELOW = "all, below"
"""Label of points under budgets in which full recompute does not fit and so is no measure."""
_NEAR = 0.02
"""Scatter of medians of some dozen pairs."""
NUM_PICKED = 2
"""Baselines that race, of those that fit: the race that ranks them is short, so the second may be the fastest."""


@dataclass(frozen=True, kw_only=True)
class Rival:
    """One baseline as measured."""

    name: str
    peak_bytes: int
    over_plain: float
    """Its time over that of the plain loop."""
    is_fused: bool = False
    accumulates: bool = False


def spread_budgets(smallest_bytes: int, largest_bytes: int, *, count: int) -> list[int]:
    """Budgets spread evenly from the one to the other, both included."""
    room_bytes = max(0, largest_bytes - smallest_bytes)
    return [smallest_bytes + room_bytes * step // (count - 1) for step in range(count)]


def pick_rivals(rivals: Iterable[Rival], *, budget_bytes: int, accumulates: bool) -> list[str]:
    """Pick the fastest that fit: two with the same kernels, one with fused ones. accumulates: plans may accumulate too."""
    fitting = [r for r in rivals if r.peak_bytes <= budget_bytes and (accumulates or not r.accumulates)]
    fitting.sort(key=lambda rival: (rival.over_plain, rival.name))
    same = [rival.name for rival in fitting if not rival.is_fused]
    return same[:NUM_PICKED] + [rival.name for rival in fitting if rival.is_fused][:1]


def race_of(point: Row, rivals: Sequence[Rival]) -> tuple[str, ...]:
    """Contenders that run beside a point's plan: those that its time is reported against, and its rivals."""
    picked = pick_rivals(rivals, budget_bytes=point["budget_bytes"], accumulates=point["levers"] != "blocks")
    return tuple(dict.fromkeys([PLAIN, FULL, point["contender"], *picked]))


def group_races(races: Mapping[int, Sequence[str]], *, room: int) -> list[tuple[list[int], list[str]]]:
    """Merge races, each as the points it serves and the contenders that run.

    The more share one race, the more rounds each comparison has in the same time. room: most contenders of one race; the first
    two of every race are the same.
    """
    groups: list[tuple[list[int], list[str]]] = []
    for index, names in races.items():
        for indices, together in groups:
            joined = list(dict.fromkeys([*together, *names]))
            if len(joined) <= room:
                indices.append(index)
                together[:] = joined
                break
        else:
            groups.append(([index], list(names)))
    return groups


def compare(point: Row, times: Mapping[str, Sequence[float]], rivals: Sequence[Rival]) -> Row:
    """Compare the times of one race, in which ``point["contender"]`` is the plan."""
    ours = times[point["contender"]]
    fitting = [r for r in rivals if r.name in times and r.peak_bytes <= point["budget_bytes"]]
    quartiles = statistics.quantiles([mine / plain for mine, plain in zip(ours, times[PLAIN], strict=True)], n=4)
    return {
        "ms": round(statistics.median(ours), 1),
        "over_plain": ratio(ours, times[PLAIN]),
        "over_plain_quartiles": [round(value, 4) for value in (quartiles[0], quartiles[2])],
        "full_over_plain": ratio(times[FULL], times[PLAIN]),
        **_against("best", [rival.name for rival in fitting if not rival.is_fused], ours, times),
        **_against("fused", [rival.name for rival in fitting if rival.is_fused], ours, times),
    }


def is_near_goal(compared: Row) -> bool:
    """True if so few rounds cannot say on which side of the goal a point lies; such points run again, for longer."""
    return any(abs(compared.get(name, 0.0) - BEHIND_GOAL) <= _NEAR for name in ("over_best", "over_fused"))


def _against(label: str, names: Sequence[str], ours: Sequence[float], times: Mapping[str, Sequence[float]]) -> Row:
    if not names:
        return {label: None}
    best = min(names, key=lambda name: statistics.median(times[name]))
    return {label: best, f"over_{label}": ratio(ours, times[best])}


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """Median ratio of pairs."""
    return round(statistics.median(a / b for a, b in zip(mine, theirs, strict=True)), 4)


def won_back(points: Sequence[Row]) -> float | None:
    """Share of full recompute's extra time over plain training that the plans save, averaged over one model's budgets.

    A plan faster than plain training counts as saving all of it; one slower than full recompute counts against. None if full
    recompute costs nothing.
    """
    full = statistics.median(point["full_over_plain"] for point in points) - 1
    if full <= 0:
        return None
    return statistics.fmean(min(1.0, 1 - (point["over_plain"] - 1) / full) for point in points)


def summarize(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    points = [row for row in rows if row.get("what") == "point"]
    failed = sum(row.get("what") == "failed" for row in rows)
    over = [point for point in points if not point["finished"] or point["peak_bytes"] > point["budget_bytes"]]
    fits = f"{len(points) - len(over)} of {len(points)}"
    summary = {
        "sweep: baselines that failed": goal(failed, 0, met=failed == 0),
        "sweep: measured peaks within the budget": goal(fits if points else None, "all", met=not over),
    }
    for levers in dict.fromkeys(point["levers"] for point in points):
        mine = [point for point in points if point["levers"] == levers and point["finished"]]
        if levers != BELOW or any("over_best" in point for point in mine):
            summary |= _behind(f"sweep, {levers}: step time over the fastest that fits, worst", mine, "over_best")
        if any("over_fused" in point for point in mine):
            summary |= _behind(f"sweep, {levers}: the same against fused kernels", mine, "over_fused")
        if levers == BELOW:
            continue
        shares = [won_back(group) for group in by_model(mine)]
        known = [share for share in shares if share is not None]
        average = round(statistics.fmean(known), 3) if known else None
        summary[f"sweep, {levers}: won back of what full recompute costs"] = goal(
            average, WON_BACK_GOAL, met=average is not None and average >= WON_BACK_GOAL, needs="full size"
        )
    return summary


def _behind(label: str, points: Sequence[Row], name: str) -> dict[str, GoalEntry]:
    """Judge the worst ratio; a point where nothing else fits has none."""
    found = [point[name] for point in points if name in point]
    worst = max(found, default=None)
    within = sum(value <= BEHIND_GOAL for value in found)
    value = None if worst is None else f"{worst} ({within} of {len(found)} within)"
    return {label: goal(value, BEHIND_GOAL, met=worst is not None and worst <= BEHIND_GOAL, needs="full size")}


def by_model(points: Sequence[Row]) -> list[list[Row]]:
    """Group points by model, in order of appearance."""
    names = dict.fromkeys(point["model"] for point in points)
    return [[point for point in points if point["model"] == name] for name in names]
