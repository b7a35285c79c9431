"""The last word before ``fits``: price afresh, replay moment by moment, apart from the solver's arithmetic.

Does not trust the numbers a search carried along: not the peak, not the sums, not the order. Returns what is wrong
rather than raising, so that a search can pass over a plan and take the next.
"""

from optimizer.estimate.prediction import Prediction
from optimizer.plan.plan import Plan
from optimizer.search.problem import SearchProblem


class VerificationFailed(RuntimeError):
    """No plan that the solver found survives its replay: a fault of the program, never of the user's request."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("no plan survived verification: " + "; ".join(problems))
        self.problems = problems


def verify_plan(problem: SearchProblem, *, plan: Plan, prediction: Prediction) -> tuple[str, ...]:
    """Reasons against calling this plan feasible; empty where there are none."""
    problem.check(plan)
    price = problem.price_afresh or problem.price
    fresh = price(Plan.from_json(plan.to_json()))
    return (
        *_forbidden(problem, plan),
        *_changed(fresh, prediction),
        *_over_budget(problem, fresh),
        *_inconsistent(fresh),
        *(problem.audit(plan, fresh) if problem.audit is not None else ()),
    )


def _forbidden(problem: SearchProblem, plan: Plan) -> list[str]:
    return [
        f"uses {technique}, which is not allowed" for technique in plan.techniques if not problem.allows(technique)
    ]


def _changed(fresh: Prediction, prediction: Prediction) -> list[str]:
    same = fresh.device_peak_high_bytes == prediction.device_peak_high_bytes and fresh.step_ms == prediction.step_ms
    return [] if same else ["costs differently when priced again"]


def _over_budget(problem: SearchProblem, fresh: Prediction) -> list[str]:
    """Every moment of the timeline, and the interval's upper end, against the budgets."""
    budget_bytes = problem.goal.device_budget_bytes
    wrong = []
    for point in fresh.timeline:
        if sum(point.bytes_by_category.values()) > budget_bytes:
            wrong.append(f"is over the device budget in {point.phase} at {point.offset_ms:.2f} ms")
            break
    if fresh.device_peak_high_bytes > budget_bytes:
        wrong.append("may exceed the device budget within its interval")
    if fresh.host_peak_bytes > problem.host_budget_bytes:
        wrong.append("exceeds the host budget")
    if fresh.disk_peak_bytes > problem.disk_budget_bytes:
        wrong.append("exceeds the disk budget")
    if fresh.remote_peak_bytes > problem.remote_budget_bytes:
        wrong.append("exceeds the room of the remote store")
    return wrong


def _inconsistent(fresh: Prediction) -> list[str]:
    wrong = []
    if sum(fresh.device_bytes_by_category.values()) != fresh.device_peak_bytes:
        wrong.append("has categories that do not add up to its peak")
    replayed_bytes = max(
        (sum(point.bytes_by_category.values()) for point in fresh.timeline), default=fresh.device_peak_bytes
    )
    if replayed_bytes != fresh.device_peak_bytes:
        wrong.append(f"has a timeline whose peak is {replayed_bytes}, not {fresh.device_peak_bytes} bytes")
    if not fresh.device_peak_low_bytes <= fresh.device_peak_bytes <= fresh.device_peak_high_bytes:
        wrong.append("has a peak outside its own interval")
    return wrong
