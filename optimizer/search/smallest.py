"""Nothing fits: how small the job could be made, what it is then made of, and what else could be allowed."""

from dataclasses import replace

from optimizer.errors import NoFeasiblePlan
from optimizer.search.pricebook import PriceBook
from optimizer.search.problem import SearchProblem
from optimizer.search.solve import price_lightest
from optimizer.units import format_bytes
from optimizer.workload import Technique

_LEVERS: dict[Technique, str] = {
    "recompute": "recompute",
    "offload": "offload",
    "accumulate": "accumulation",
    "bf16": "bf16",
    "8bit_optimizer": "8-bit optimizer state",
}


def explain_infeasible(problem: SearchProblem) -> NoFeasiblePlan:
    """The error to raise. Its budget is enough: a search with exactly that much succeeds."""
    book = _priced_floor(problem)
    fitting_host = [pair for pair in book.permitted() if pair[1].host_peak_bytes <= problem.host_budget_bytes]
    plan, prediction = min(fitting_host, key=lambda pair: pair[1].device_peak_high_bytes)
    error = NoFeasiblePlan(
        budget_bytes=problem.goal.device_budget_bytes,
        smallest_feasible_bytes=prediction.device_peak_high_bytes,
        bytes_by_category=prediction.device_bytes_by_category,
        hint=_hint(problem, prediction.device_peak_high_bytes),
    )
    error.fields["smallest_plan"] = plan.to_json()
    return error


def _priced_floor(problem: SearchProblem) -> PriceBook:
    """Only the settings that can be smallest: one sequence at a time, and the whole batch, which sums no gradients."""
    book = PriceBook(problem)
    sizes = [setting.micro_batch_size for setting in problem.settings()]
    for setting in problem.settings():
        if setting.micro_batch_size == min(sizes) or setting.accumulation_steps == 1:
            price_lightest(book, setting)
    return book


def _hint(problem: SearchProblem, smallest_bytes: int) -> str:
    """Ways out, the ones that cost least to the user first."""
    ways = [f"Raise the budget to {format_bytes(smallest_bytes)}", "shorten the sequence"]
    forbidden = [name for technique, name in _LEVERS.items() if technique in problem.goal.forbid]
    if forbidden:
        ways.append(f"permit {' or '.join(forbidden)}")
    if not problem.goal.allow_lossy:
        ways.append(_lossy_way(problem, smallest_bytes))
    return ", ".join(ways[:-1]) + f", or {ways[-1]}."


def _lossy_way(problem: SearchProblem, smallest_bytes: int) -> str:
    relaxed = replace(problem, goal=replace(problem.goal, allow_lossy=True))
    peaks = [
        prediction.device_peak_high_bytes
        for _, prediction in _priced_floor(relaxed).permitted()
        if prediction.host_peak_bytes <= problem.host_budget_bytes
    ]
    gain = f" (smallest peak then {format_bytes(min(peaks))})" if peaks and min(peaks) < smallest_bytes else ""
    return f"allow lossy choices, bf16 and 8-bit optimizer state{gain}"
