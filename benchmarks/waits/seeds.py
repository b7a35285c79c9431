"""Runs every plan of the suite on the hostile device under many orders, each to the bits of the plain CPU device."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.common.journal import Journal
from benchmarks.common.record import GoalEntry, Row, goal

NUM_SEEDS = 20
_NUM_STEPS = 2
"""One that begins beside the updates of the one before is enough, and one order of all cases then takes a minute or two."""
_NUM_NEW = 4


def run_seeds(journal: Journal, *, num_seeds: int, sources: str) -> None:
    """Each case with the late and the early schedule, then with so many random ones; a row for each schedule and seed."""
    from tests.hostile_device.cases import list_all_cases
    from tests.hostile_device.ranks.cases import list_rank_cases

    schedules: list[tuple[Any, int]] = [("late", 0), ("early", 0), *(("random", seed) for seed in range(num_seeds))]
    cases = [*list_rank_cases(), *list_all_cases(num_steps=_NUM_STEPS, num_new=_NUM_NEW)]
    for schedule, seed in schedules:
        journal.do(
            partial(_run_all, cases, schedule=schedule, seed=seed),
            what="order", sources=sources, schedule=schedule, seed=seed,
        )  # fmt: skip


def summarize(rows: Sequence[Row]) -> Mapping[str, GoalEntry]:
    orders = [row for row in rows if row["what"] == "order"]
    num_runs, num_wrong = (sum(row[name] for row in orders) for name in ("num_cases", "num_wrong"))
    num_seeds = sum(row["schedule"] == "random" for row in orders)
    return {
        "runs with the bits of the plain CPU device": goal(
            f"{num_runs - num_wrong} of {num_runs}" if num_runs else None, "all", met=not num_wrong
        ),
        "random orders of every case": goal(num_seeds or None, NUM_SEEDS, met=num_seeds >= NUM_SEEDS, needs="all cases"),
    }


def _run_all(cases: Sequence[Any], *, schedule: str, seed: int) -> Row:
    begin_s = time.monotonic()
    wrong = {}
    for case in cases:
        difference = find_difference(case, repr(case.expected), schedule=schedule, seed=seed)
        if difference:
            wrong[case.name] = difference
            print(f"{case.name}, {schedule} {seed}: {difference}", flush=True)
    seconds = round(time.monotonic() - begin_s, 1)
    return {"num_cases": len(cases), "num_wrong": len(wrong), "wrong": wrong, "seconds": seconds}


def find_difference(case: Any, expected: str, *, schedule: Any, seed: int) -> str:
    """The difference that a run makes; empty for none."""
    try:
        return "" if repr(case.on_hostile_device(schedule=schedule, seed=seed)) == expected else "other bits"
    except Exception as error:
        return f"{type(error).__name__}: " + " ".join(str(error).split())[:160]
