"""The arithmetic of ``cards.py``: from rows to goals."""

import statistics
from collections.abc import Sequence

from benchmarks.common.record import GoalEntry, Needs, Row, all_of, at_most, goal, none_of

MEDIAN_GOALS = {"allocated": 0.01, "reserved": 0.03, "time": 0.06}
WORST_GOALS = {"allocated": 0.03, "reserved": 0.06, "time": 0.15}
UNDER_GOAL = 0.02
"""Least by which a prediction of bytes may lie under what was measured."""


def summarize_cards(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    cards = [row for row in rows if row["what"] == "card"]
    ran = [row for row in cards if row["finished"]]
    caps = [row for row in rows if row["what"] == "cap"]
    num_failed = sum(row["what"] in ("failed", "left out") for row in rows)
    false_fits = sum(row["verdict"] == "fits" and not row["finished"] for row in cards)
    errors = {
        what: [row[f"predicted_{what}_bytes"] / row[f"{what}_bytes"] - 1 for row in ran]
        for what in ("allocated", "reserved")
    }
    outside = sum(
        not row["predicted_process_low_bytes"] <= row["process_bytes"] <= row["predicted_process_high_bytes"]
        for row in ran
        if "process_bytes" in row
    )
    times = [row["error"] for row in rows if row["what"] == "time" and row["held_back"]]
    return {
        "rows that failed or were left out": goal(num_failed, 0, met=num_failed == 0),
        "caps that bite": all_of(row["bites"] and row["allows"] for row in caps),
        "called fits on a card that it does not fit on": none_of(false_fits, cards),
        **_error_goals("allocated", errors["allocated"]),
        **_error_goals("reserved", errors["reserved"]),
        "processes outside of their predicted interval": none_of(outside, ran),
        **_error_goals("time", times),
    }


def _error_goals(what: str, errors: Sequence[float]) -> dict[str, GoalEntry]:
    sizes = [abs(error) for error in errors]
    median, worst = (statistics.median(sizes), max(sizes)) if sizes else (None, None)
    needs: Needs = "full size" if what == "time" else "rows"
    goals = {
        f"{what}, median error": at_most(median, MEDIAN_GOALS[what], needs=needs),
        f"{what}, worst error": at_most(worst, WORST_GOALS[what], needs=needs),
    }
    if what != "time":
        under = max((-error for error in errors), default=None)
        goals[f"{what}, most predicted too little"] = at_most(under, UNDER_GOAL)
    return goals
