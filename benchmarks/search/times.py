"""Part (c): the time of a search and the number of plans that it prices, from 4 to 120 blocks with every knob open.

Seconds of the process's processor time in one thread, so that others at work on the machine do not count; a search prices each
plan in one thread. An edit is one knob of the plan found, priced again.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.common.parts import Options, Part
from benchmarks.common.record import GoalEntry, Row, at_most
from benchmarks.search.deep import deep_problem, rounded_gap
from optimizer.base.errors import NoFeasiblePlan
from optimizer.estimate.prediction import Prediction
from optimizer.plan.plan import Plan
from optimizer.search.arrangements import keep_everything
from optimizer.search.core import search
from optimizer.search.problem import OuterPlan, SearchProblem

DEPTHS = (4, 8, 16, 32, 48, 64, 80, 120)
QUICK_DEPTHS = (4, 16, 80)
JUDGED_DEPTH = 80
SHARES = (0.9, 0.5, 0.25)
"""Budgets, as shares of what plain training would take."""
MOST_SEARCH_S, MOST_EDIT_MS = 1.0, 100.0


def time_rows(options: Options) -> Iterator[Row]:
    for num_blocks in QUICK_DEPTHS if options.quick else DEPTHS:
        for allow_lossy in (False, True):
            problem = deep_problem(num_blocks, device_budget_bytes=2**50, allow_lossy=allow_lossy)
            whole = OuterPlan(micro_batch_size=problem.workload.global_batch_size, accumulation_steps=1)
            plain = problem.price(whole.plan(keep_everything(num_blocks))).device_peak_high_bytes
            for share in SHARES:
                yield {
                    "part": "times",
                    "num_blocks": num_blocks,
                    "lossy": allow_lossy,
                    "share": share,
                    **time_search(problem.with_budget(int(plain * share))),
                }


def time_search(problem: SearchProblem) -> Row:
    asked: list[Plan] = []

    def counting(plan: Plan) -> Prediction:
        asked.append(plan)
        return problem.price(plan)

    started_s = time.process_time()
    try:
        result = search(replace(problem, price=counting))
    except NoFeasiblePlan as error:
        return {"search_s": time.process_time() - started_s, "num_prices": len(asked), "why_not": str(error)}
    search_s = time.process_time() - started_s
    return {
        "search_s": round(search_s, 3),
        "num_prices": len(asked),
        "step_ms": result.chosen.prediction.step_ms,
        "gap": rounded_gap(result),
        "edit_ms": round(time_edit(problem, result.chosen.plan), 2),
    }


def time_edit(problem: SearchProblem, plan: Plan) -> float:
    """Milliseconds for the price of the plan with one block changed; the median of several."""
    setting, per_block = OuterPlan.of(plan), plan.activations.per_block
    times = []
    for block in range(min(5, len(per_block))):
        other = next(choice for choice in problem.choices if choice != per_block[block])
        edited = setting.plan((*per_block[:block], other, *per_block[block + 1 :]))
        started_s = time.process_time()
        problem.price(edited)
        times.append((time.process_time() - started_s) * 1000)
    return statistics.median(times)


def summarize(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    judged = [row for row in rows if row["num_blocks"] == JUDGED_DEPTH]
    slowest_s = max((row["search_s"] for row in judged), default=None)
    edit_ms = max((row["edit_ms"] for row in judged if "edit_ms" in row), default=None)
    return {
        f"search of {JUDGED_DEPTH} blocks with every knob open, worst, seconds": at_most(slowest_s, MOST_SEARCH_S),
        "price after one edit, worst, milliseconds": at_most(edit_ms, MOST_EDIT_MS),
    }


PART = Part(name="times", measure=time_rows, summarize=summarize)
