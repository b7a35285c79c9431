"""Nothing fits: how small the generation could be made, what it is then made of, and what else could be allowed."""

from dataclasses import replace
from functools import partial
from math import inf

from optimizer.base.errors import NoFeasiblePlan
from optimizer.base.units import format_bytes
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.pins.table import shown_pin
from optimizer.plan.techniques import TECHNIQUE_LABELS
from optimizer.search.answer.nothing_fits import nothing_fits
from optimizer.search.check.pin_errors import no_room_elsewhere
from optimizer.search.generation.levers import list_families
from optimizer.search.generation.problem import GenerationProblem


def explain_nothing_fits(problem: GenerationProblem) -> NoFeasiblePlan:
    """The error to raise. Its budget is enough: a search with exactly that much succeeds."""
    plan = find_smallest(problem)
    return nothing_fits(problem, plan, problem.price(plan), list_ways=partial(_list_ways, problem))


def find_smallest(problem: GenerationProblem) -> GenerationPlan:
    """One sequence at a time, in the arrangement with the least peak for which the other tiers have room; where none can even be
    loaded, the one whose load takes least of the host.

    Raises InvalidPlan where pins leave none that has.
    """
    lean = _list_lean(problem)
    roomy = [plan for plan in lean if problem.fits_elsewhere(problem.price(plan))]
    if roomy:
        return min(roomy, key=lambda plan: problem.price(plan).device_peak_high_bytes)
    passing = [plan for plan in lean if problem.fits_beside_stages(problem.price(plan))]
    if not passing:
        raise no_room_elsewhere(problem)
    return min(passing, key=lambda plan: _load_first(problem.price(plan)))


def _load_first(prediction: GenerationPrediction) -> tuple[int, int]:
    load = prediction.load
    return 0 if load is None else load.host_peak_bytes, prediction.device_peak_high_bytes


def _list_lean(problem: GenerationProblem) -> list[GenerationPlan]:
    """Without what only ever takes more: further micro-batches, and, as far as pins allow, what comes ahead or is made again, and
    more of a prompt at once.
    """
    lean: dict[GenerationPlan, GenerationPlan] = {}
    for plan in (family.plan for family in list_families(problem)):
        weights, cache = plan.weights, plan.kv_cache
        alike = replace(
            plan,
            prefill_tokens=None,
            weights=replace(weights, prefetch=0),
            kv_cache=replace(cache, prefetch=0, prefix_tokens=0),
        )
        if alike not in lean or _extras(plan) < _extras(lean[alike]):
            lean[alike] = plan
    return list(lean.values())


def _extras(plan: GenerationPlan) -> tuple[float, ...]:
    weights, cache = plan.weights, plan.kv_cache
    ahead = weights.prefetch * (weights.place != "device") + cache.num_ahead
    return ahead, cache.prefix_tokens, plan.prefill_tokens or inf


def _list_ways(problem: GenerationProblem, smallest_bytes: int) -> list[str]:
    """Ways out, the ones that cost least to the user first. What is said to help has been priced."""
    ways = [f"Raise the budget to {format_bytes(smallest_bytes)}", "shorten prompts or generate fewer tokens"]
    goal = problem.goal
    for technique in goal.forbid:
        others = tuple(other for other in goal.forbid if other != technique)
        permitting = replace(problem, goal=replace(goal, forbid=others))
        ways += _way(f"permit '{TECHNIQUE_LABELS[technique]}'", permitting, smallest_bytes)
    for path, value in goal.pins.values():
        free = replace(problem, goal=replace(goal, pins=goal.pins.without(path)))
        ways += _way(f"leave out the pin of {path} to {shown_pin(value)}", free, smallest_bytes)
    ways += _way("give it more host memory", replace(problem, host_budget_bytes=2**62), smallest_bytes)
    if not goal.allow_lossy:
        lossy = replace(problem, goal=replace(goal, allow_lossy=True))
        ways += _way("allow choices that change the numbers, such as bf16 and packed weights", lossy, smallest_bytes)
    return ways


def _way(text: str, relaxed: GenerationProblem, smallest_bytes: int) -> list[str]:
    """Empty where it would not help."""
    found = relaxed.price(find_smallest(relaxed))
    helps = found.device_peak_high_bytes < smallest_bytes and relaxed.fits_elsewhere(found)
    return [f"{text} (smallest peak then {format_bytes(found.device_peak_high_bytes)})"] if helps else []
