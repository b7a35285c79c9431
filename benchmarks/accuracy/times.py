"""Step times of ``benchmarks.accuracy``: measured in rounds over all cases, and predicted with one calibration.

The calibration is fitted to the cases that are not held back, and judged on those that are.

What is normalised: each step's time is divided by the machine's pace in that moment, which is how long a yardstick (fixed work of
torch's own, ``common/yardstick.py``) took right before and right after it, over how long it usually takes in this run, its first
quartile over all cases. A case's time is the median of its steps so divided. The same pace divides every case, whatever was
predicted for it. Each row also has the time as the clock had it (``as_timed_ms``), and a table its errors.
"""

import functools
import hashlib
import itertools
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.accuracy.cases import Case
from benchmarks.accuracy.run import Bench, head_of, predicted_ms, time_steps, timed_run
from benchmarks.common.journal import Journal
from benchmarks.common.record import Row
from optimizer.hardware.calibration import fit_calibration

NUM_ROUNDS = 3
NUM_STEPS = 2
"""Steps of a case that count in each round, after one that does not."""


BUDGET_S = 570.0
"""No case is begun a second time after this; the first round is always whole.
Probe and traces come on top: 12 minutes in all."""


def measure_times(
    journal: Journal, cases: Sequence[Case], *, num_rounds: int = NUM_ROUNDS, budget_s: float = BUDGET_S
) -> None:
    """Rounds are far apart, so that a slow minute of the machine does not fall on one case alone.

    After the first round those that are judged come before those that are fitted, and of either the least settled first.
    """
    started_s = time.monotonic()
    for index in range(num_rounds):
        for case in _in_turn(cases, journal.rows, is_first=index == 0):
            if index and time.monotonic() - started_s > budget_s:
                return
            make = functools.partial(time_steps, case, num_steps=NUM_STEPS)
            journal.do(make, what="step times", case=case.name, round=index)


def _in_turn(cases: Sequence[Case], rows: Sequence[Row], *, is_first: bool) -> list[Case]:
    if is_first:
        return list(cases)
    spread = spreads(rows)
    return sorted(cases, key=lambda case: (not case.is_held_back, -spread.get(case.name, 0.0)))


def spreads(rows: Iterable[Row]) -> dict[str, float]:
    """Spread of each case's steps, as a share of the shortest."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["what"] == "step times":
            found.setdefault(row["case"], []).extend(row["step_ms"])
    return {name: max(times) / min(times) - 1 for name, times in found.items()}


def predicted_rows(bench: Bench, cases: Iterable[Case], rows: Sequence[Row]) -> list[Row]:
    """One row of what ``time`` for each case that was timed."""
    if not any(row["what"] == "step times" for row in rows):
        return []
    measured, as_timed = paced_times(rows), median_times(rows)
    timed = [case for case in cases if case.name in measured]
    calibration = fit(bench, [case for case in timed if not case.is_held_back], measured)
    found = []
    for case in timed:
        bare, prediction = bench.predict(case), bench.predict(case, calibration=calibration)
        case_ms = predicted_ms(prediction, case)
        measured_ms = measured[case.name]
        found.append(
            {
                "what": "time",
                **head_of(case),
                "predicted_ms": round(case_ms, 3),
                "uncalibrated_ms": round(predicted_ms(bare, case), 3),
                "measured_ms": round(measured_ms, 3),
                "as_timed_ms": round(as_timed[case.name], 3),
                "error": case_ms / measured_ms - 1,
                "as_timed_error": case_ms / as_timed[case.name] - 1,
                "uncalibrated_by_kind_ms": {
                    kind: round(value, 3)
                    for kind, value in timed_run(bare, measured_ms=measured_ms).predicted_ms.items()
                },
            }
        )
    return found


def median_times(rows: Iterable[Row]) -> dict[str, float]:
    """Median step time of each case over all rounds, by the clock."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["what"] == "step times":
            found.setdefault(row["case"], []).extend(row["step_ms"])
    return {name: statistics.median(times) for name, times in found.items()}


def paced_times(rows: Sequence[Row]) -> dict[str, float]:
    """Median step time of each case over all rounds, each step divided by the machine's pace beside it."""
    found: dict[str, list[float]] = {}
    usual_ms = usual_yardstick_ms(rows)
    for row in rows:
        if row["what"] == "step times":
            around = itertools.pairwise(row["yardstick_ms"])
            paces = [(before_ms + after_ms) / 2 / usual_ms for before_ms, after_ms in around]
            found.setdefault(row["case"], []).extend(ms / pace for ms, pace in zip(row["step_ms"], paces, strict=True))
    return {name: statistics.median(times) for name, times in found.items()}


def usual_yardstick_ms(rows: Iterable[Row]) -> float:
    """First quartile of all that were taken beside steps."""
    taken = sorted(ms for row in rows if row["what"] == "step times" for ms in row["yardstick_ms"])
    return float(taken[len(taken) // 4])


def describe_pace(rows: Sequence[Row]) -> dict[str, float]:
    """The yardstick's time over its usual one: beside the steps at the median and the worst, and beside the probe."""
    usual_ms = usual_yardstick_ms(rows)
    beside = [ms / usual_ms for row in rows if row["what"] == "step times" for ms in row["yardstick_ms"]]
    probed = [ms / usual_ms for row in rows if row["what"] == "machine" for ms in row["yardstick_ms"]]
    found = {"median": statistics.median(beside), "worst": max(beside)}
    if probed:
        found["beside the probe"] = statistics.median(probed)
    return {name: round(pace, 3) for name, pace in found.items()}


def fit(bench: Bench, cases: Iterable[Case], measured: Mapping[str, float]) -> dict[str, Any]:
    """Fit the calibration that the machine learns from these cases, as from finished jobs.

    Only the latest runs count there, so cases are put in an order that mixes models: by a hash of their names.
    """
    mixed = sorted(cases, key=lambda case: hashlib.sha256(case.name.encode()).digest())
    return fit_calibration(timed_run(bench.predict(case), measured_ms=measured[case.name]) for case in mixed)
