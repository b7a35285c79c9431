"""A sweep of budgets over one problem: more memory never makes a slower plan, each budget searched by itself. Beside it
torch's own knob, run at as many settings (``rivals/knob.py``)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from benchmarks.common.parts import Options, Part
from benchmarks.common.record import GoalEntry, Row, goal, none_of
from benchmarks.search.deep import deep_problem, rounded_gap
from benchmarks.search.rivals.knob import knob_rows
from optimizer.base.errors import NoFeasiblePlan
from optimizer.search.arrangements import keep_everything
from optimizer.search.core import search
from optimizer.search.problem import OuterPlan, SearchProblem

NUM_BUDGETS = 15
DEPTHS = (6, 32, 80)
QUICK_DEPTHS = (6, 32)


def monotone_rows(options: Options) -> Iterator[Row]:
    for num_blocks in QUICK_DEPTHS if options.quick else DEPTHS:
        for allow_lossy in (False, True):
            problem = deep_problem(num_blocks, device_budget_bytes=1, allow_lossy=allow_lossy)
            for row in sweep(problem):
                yield {"part": "monotone", "what": "budget", "num_blocks": num_blocks, "lossy": allow_lossy, **row}
    for row in knob_rows(options):
        yield {"part": "monotone", **row}


def sweep(problem: SearchProblem, *, num_budgets: int = NUM_BUDGETS) -> Iterator[Row]:
    """Search at budgets spread evenly from the smallest feasible one to the bytes of plain training."""
    problem = replace(problem, price=cache(problem.price))
    whole = OuterPlan(micro_batch_size=problem.workload.global_batch_size, accumulation_steps=1)
    plain_bytes = problem.price(whole.plan(keep_everything(problem.num_blocks))).device_peak_high_bytes
    smallest_bytes = find_smallest_bytes(problem)
    before_ms = float("inf")
    for index in range(num_budgets):
        budget_bytes = smallest_bytes + (plain_bytes - smallest_bytes) * index // (num_budgets - 1)
        result = search(problem.with_budget(budget_bytes))
        step_ms = result.chosen.prediction.step_ms
        yield {
            "budget_bytes": budget_bytes,
            "step_ms": step_ms,
            "gap": rounded_gap(result),
            "slower_than_with_less": step_ms > before_ms,
        }
        before_ms = min(before_ms, step_ms)


def find_smallest_bytes(problem: SearchProblem) -> int:
    try:
        search(problem.with_budget(1))
    except NoFeasiblePlan as error:
        return int(error.fields["smallest_feasible_bytes"])
    raise AssertionError("a plan fits one byte")


def summarize(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    budgets = [row for row in rows if row.get("what") == "budget"]
    knob = [row for row in rows if row.get("what") == "knob"]
    num_slower = sum(row["slower_than_with_less"] for row in budgets)
    broken = sum(row["peaks_below_a_lower_setting"] or row["works_more_than_a_lower_setting"] for row in knob)
    return {
        f"of {len(budgets)} budgets, slower than a smaller one": none_of(num_slower, budgets),
        "largest gap to the bound in the sweep": goal(
            max((row["gap"] for row in budgets if row["gap"] is not None), default=None),
            "reported",
            met=all(row["gap"] is not None for row in budgets),
        ),
        f"of {len(knob)} settings of torch's knob, with more memory allowed less is held or more is worked": goal(
            broken if knob else None, "reported", met=True
        ),
    }


PART = Part(name="monotone", measure=monotone_rows, summarize=summarize)
