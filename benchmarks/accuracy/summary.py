"""The arithmetic of ``benchmarks.accuracy``: from rows to goals, and to tables of errors.

Times are predicted with a calibration that was fitted to the cases that are not held back.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.common.record import GoalEntry, Needs, Row, all_of, at_most, goal, none_of

MEDIAN_BYTES_GOAL, WORST_BYTES_GOAL = 0.001, 0.01
MEDIAN_TIME_GOAL, WORST_TIME_GOAL = 0.08, 0.25
NUM_CASES_GOAL, NUM_MODELS_GOAL = 200, 12
UNDER = ("-1 %", "-0.1 %", "-1 B")
"""Budgets that the measured peak does not fit in."""


def summarize(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    """The goals of both parts of the proof, bytes first."""
    num_failed = sum(row["what"] == "failed" for row in rows)
    return {
        "rows that failed": goal(num_failed, 0, met=num_failed == 0),
        **summarize_cases(rows),
        **summarize_memory(rows),
        **summarize_time(rows),
    }


def summarize_cases(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    cases = {row["case"] for row in rows if row["what"] == "memory"}
    models = {row["model"] for row in rows if row["what"] == "memory"}
    return {
        "cases": goal(len(cases), f">= {NUM_CASES_GOAL}", met=len(cases) >= NUM_CASES_GOAL, needs="all cases"),
        "architectures": goal(
            len(models), f">= {NUM_MODELS_GOAL}", met=len(models) >= NUM_MODELS_GOAL, needs="all cases"
        ),
    }


def summarize_memory(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    memory = [row for row in rows if row["what"] == "memory"]
    held_back = [row for row in memory if row["held_back"]]
    num_wrong = sum(bool(row["wrong_categories"]) for row in memory)
    num_off = sum(any(row["stage_error_bytes"].values()) for row in memory)
    false_fits = sum(verdict == "fits" for row in memory for name, verdict in row["verdicts"].items() if name in UNDER)
    refusals = sum(
        verdict == "does_not_fit" for row in memory for name, verdict in row["verdicts"].items() if name not in UNDER
    )
    if not memory:
        return {}
    return {
        "device peak error, median": _at_most(_errors(memory), statistics.median, MEDIAN_BYTES_GOAL),
        "device peak error, worst": _at_most(_errors(memory), max, WORST_BYTES_GOAL),
        "device peak error, held back, median": _at_most(_errors(held_back), statistics.median, MEDIAN_BYTES_GOAL),
        "device peak error, held back, worst": _at_most(_errors(held_back), max, WORST_BYTES_GOAL),
        "cases whose weights, gradients or state are not the measured ones to the byte": none_of(num_wrong, memory),
        "first steps and evaluations not predicted to the meter's byte": none_of(num_off, memory),
        "called fits under a budget that the peak exceeds": none_of(false_fits, memory),
        "called does not fit in a budget that the peak fits in": none_of(refusals, memory),
        **_carried_out([row for row in rows if row["what"] == "carried out"]),
    }


def _carried_out(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    return {
        "runs under the predicted bound that finished": all_of(row["finished"] for row in rows),
        "runs at one byte under their peak that were refused": all_of(row["refused_below"] for row in rows),
    }


def summarize_time(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    """Judge the rows that ``times.predicted_rows`` makes."""
    timed = [row for row in rows if row["what"] == "time"]
    held_back = [row for row in timed if row["held_back"]]
    fitted = [row for row in timed if not row["held_back"]]
    summary = {
        "step time error, held back, median": _time_at_most(held_back, statistics.median, MEDIAN_TIME_GOAL),
        "step time error, held back, worst": _time_at_most(held_back, max, WORST_TIME_GOAL),
        "step time error, fitted, median": _time_at_most(fitted, statistics.median, MEDIAN_TIME_GOAL),
        "step time error, fitted, worst": _time_at_most(fitted, max, WORST_TIME_GOAL),
    }
    return summary if timed else {}


def tabulate_errors(rows: Iterable[Row], key: str) -> dict[str, dict[str, Any]]:
    """Number of cases, median and worst error by model, shape or technique; a case counts for each of its techniques."""
    found: dict[str, list[float]] = {}
    for row in rows:
        values = row[key] if isinstance(row[key], list) else [row[key]]
        for value in values or ["plain"]:
            found.setdefault(value, []).append(row["error"])
    return {value: describe_errors(errors) for value, errors in sorted(found.items())}


def tabulate_as_timed(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """Errors against the clock's own times, beside those of the summary, which are at the machine's usual pace."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault("held back" if row["held_back"] else "fitted", []).append(row["as_timed_error"])
    return {name: describe_errors(errors) for name, errors in sorted(found.items())}


def describe_errors(errors: Sequence[float]) -> dict[str, Any]:
    """worst keeps its sign: above 0 is predicted too much."""
    sizes = [abs(error) for error in errors]
    worst = errors[sizes.index(max(sizes))]
    return {"num_cases": len(errors), "median": round(statistics.median(sizes), 6), "worst": round(worst, 6)}


def tabulate_estimators(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Errors of each way to estimate bytes, the number of cases that it cannot answer, and the cost of an answer."""
    answers = [row for row in rows if row["what"] == "estimator"]
    tables: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["estimator"] for row in answers):
        mine = [row for row in answers if row["estimator"] == name]
        answered = [row for row in mine if row["error"] is not None]
        tables[name] = {
            "num_asked": len(mine),
            "num_not_traceable": sum(row["why_not"] == "not traceable" for row in mine),
            "num_not_expressible": sum(row["why_not"] == "not expressible" for row in mine),
            **(describe_errors([row["error"] for row in answered]) if answered else {}),
            "median_ms": round(statistics.median(row["took_ms"] for row in answered), 3) if answered else None,
        }
    return tables


def _errors(rows: Iterable[Mapping[str, Any]]) -> list[float]:
    return [abs(row["error"]) for row in rows]


def _time_at_most(rows: Sequence[Row], pick: Callable[[Sequence[float]], float], limit: float) -> GoalEntry:
    return _at_most(_errors(rows), pick, limit, needs="full size")


def _at_most(
    errors: Sequence[float], pick: Callable[[Sequence[float]], float], limit: float, *, needs: Needs = "rows"
) -> GoalEntry:
    return at_most(round(pick(errors), 6) if errors else None, limit, needs=needs)
