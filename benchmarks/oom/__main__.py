"""Injects out-of-memories into real runs: ``python -m benchmarks.oom [--quick] [--cause NAME] [--json FILE]``.

Each is a job of a tiny model under the plan that the search found for its budget, which one cause then exceeds. Counted are
causes named rightly, next plans that fit, plans tried twice and steps lost. A full run takes about ten minutes on two cores.
"""

import argparse
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.common.record import GoalEntry, Record, Row, describe_machine, failure, goal
from benchmarks.oom.cases import run_case
from optimizer.estimate.job.causes import CAUSES

ROUNDS = 14
"""Cases of each cause: with 16 causes more than the 200 that are wanted."""
SEED = 20261125
WANTED = 200
MOST_PLAN_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.oom", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one case of each cause")
    parser.add_argument("--cause", choices=CAUSES, help="this cause alone")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--json", type=Path, help="file for the result")
    arguments = parser.parse_args()
    causes = CAUSES if arguments.cause is None else (arguments.cause,)
    machine = describe_machine(torch.device("cpu"))
    record = Record(file=arguments.json, machine=machine, is_quick=arguments.quick, is_whole=arguments.cause is None)
    warnings.simplefilter("ignore")
    for index in range(len(causes) * (1 if arguments.quick else ROUNDS)):
        try:
            record.add(run_case(arguments.seed, index, causes=causes))
        except Exception as error:
            record.add(failure(f"case {index}", error))
    return record.finish(summarize(record.rows))


def summarize(rows: Sequence[Row]) -> Mapping[str, GoalEntry]:
    """Goals over the cases, and no failure of the benchmark itself."""
    cases = [row for row in rows if row["what"] == "case"]
    replanned = [row for row in cases if row["ended"] != "named"]
    fits = {most: [row["ended"] == "done" and row["num_retries"] <= most for row in replanned] for most in (1, 2)}
    lost = max((row["most_steps_lost"] for row in cases), default=None)
    slowest = max((row["longest_plan_s"] for row in cases), default=None)
    num_failed = sum(row["what"] == "failed" for row in rows)
    return {
        "out-of-memories injected": goal(
            len(cases) or None, f">= {WANTED}", met=len(cases) >= WANTED, needs="all cases"
        ),
        "causes named rightly": share([row["is_named_right"] for row in cases], at_least=0.95),
        "the next plan fits at the first retry": share(fits[1], at_least=0.90),
        "a plan fits by the second retry": share(fits[2], at_least=0.98),
        "plans tried twice": goal(
            sum(row["has_repeated"] for row in cases) if cases else None,
            0,
            met=not any(row["has_repeated"] for row in cases),
        ),
        "most steps lost, with a checkpoint each step": goal(lost, "<= 1", met=lost is not None and lost <= 1),
        "longest search of a next plan, s": goal(
            slowest, f"<= {MOST_PLAN_S:g}", met=slowest is not None and slowest <= MOST_PLAN_S
        ),
        "cases that broke": goal(num_failed if rows else None, 0, met=num_failed == 0),
    }


def share(outcomes: Sequence[bool], *, at_least: float) -> GoalEntry:
    """The goal that so large a part of the outcomes is good; without outcomes nothing was measured."""
    part = sum(outcomes) / len(outcomes) if outcomes else None
    value = None if part is None else f"{100 * part:.1f} % ({sum(outcomes)} of {len(outcomes)})"
    return goal(value, f">= {100 * at_least:.0f} %", met=part is not None and part >= at_least)


if __name__ == "__main__":
    raise SystemExit(main())
