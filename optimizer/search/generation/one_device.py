"""``search_generation``: the best plan of a batch generation on one device, beside baselines, with its bound, frontier and
reasons.

Torch-free; pure and deterministic: the same problem gives the same result, and no clock is read.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf
from typing import Any

from optimizer.base.serialize import WithJson
from optimizer.estimate.bounds.generation_floor import GenerationFloors
from optimizer.estimate.bounds.lower_bounds import Floors
from optimizer.estimate.generation.kv.prefix import find_prefix_conflict
from optimizer.estimate.generation.load import estimate_generation_load
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.generation.pricing import estimate_generation
from optimizer.estimate.generation.process import add_generation_memory
from optimizer.goal import GenerationGoal
from optimizer.hardware.calibration import calibrated_machine, of_generations
from optimizer.hardware.machine import Machine
from optimizer.hardware.share import share_of
from optimizer.plan.allocator import AllocatorPlan
from optimizer.plan.devices.generation_layout import GenerationLayout
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.generation import GenerationProfile
from optimizer.search.budgeted import budgets_elsewhere, list_representations, list_unavailable
from optimizer.search.check.card_fit import ACCEPTED, CardFit, find_room
from optimizer.search.generation.baselines import price_generation_baselines
from optimizer.search.generation.frontier import generation_frontier
from optimizer.search.generation.levers import MICRO_BATCHES
from optimizer.search.generation.pins import check_generation_pins
from optimizer.search.generation.problem import GenerationProblem, PricedGenerationPlan
from optimizer.search.generation.reasons import explain_choice
from optimizer.search.generation.smallest import explain_nothing_fits, find_smallest
from optimizer.search.generation.solve import Book, Solution, solve, spread_evenly
from optimizer.workload import GenerationWorkload

_MAX_LENGTHS = 3
"""Most lengths of prompts that the search distinguishes: a price grows with their number."""


@dataclass(frozen=True, kw_only=True)
class GenerationLayoutOption(WithJson):
    """The best plan of one way of using several devices."""

    layout: GenerationLayout
    best: PricedGenerationPlan | None
    """None where nothing fits, or where it was not searched."""
    sentence: str
    """A comparison with the layout that was chosen."""


@dataclass(frozen=True, kw_only=True)
class GenerationSearchResult(WithJson):
    """The result of a search. ``chosen`` always fits; a search that finds nothing raises instead."""

    chosen: PricedGenerationPlan
    baselines: dict[str, PricedGenerationPlan]
    """By label, as in ``baselines.GENERATION_BASELINES``."""
    frontier: tuple[PricedGenerationPlan, ...]
    """Plans the goal allows of which no other is both smaller and faster, from small to fast; some over the budget."""
    bound: float
    """No permitted plan that fits has less of what the goal is about: seconds of the whole workload, milliseconds to the first
    token, or sequences at once times minus one."""
    gap: float
    """Bound on the chosen plan's distance from the best, as a share; 0 where it is the best. Where a card has room for
    the tensors and not for all that comes with them, both are of plans whose tensors take no more than was left for them. Of more
    than ``MAX_EVERY`` prompts that differ in length both go by passes' average time."""
    explanation: tuple[str, ...]
    """The chosen plan in sentences."""
    layouts: tuple[GenerationLayoutOption, ...] = ()
    """Ways of using the devices that the goal allows, one device first; none where it allows one."""


def generation_problem(
    profile: GenerationProfile,
    *,
    workload: GenerationWorkload,
    goal: GenerationGoal,
    machine: Machine,
    calibration: Mapping[str, Any] | None = None,
    num_replicas: int = 1,
) -> GenerationProblem:
    """With the estimator bound as its price. Prompts of many lengths are priced with few, each a little longer than it is; what
    is shown in detail is priced with their own. num_replicas: every plan, which itself names one device, is priced as so many
    copies of it; the problem's workload is then the share of one.
    """

    coarse = _coarse(workload, max_sequence_length=profile.max_sequence_length)
    share = workload.of_replica(0, num_replicas=num_replicas)
    coarse_share = coarse.of_replica(0, num_replicas=num_replicas)
    copies = GenerationLayout(num_replicas=num_replicas)

    def laid_out(plan: GenerationPlan) -> GenerationPlan:
        return plan if num_replicas == 1 else replace(plan, layout=copies)

    def price(plan: GenerationPlan) -> GenerationPrediction:
        plan = laid_out(plan)
        return estimate_generation(
            profile, plan=plan, workload=coarse, machine=machine, calibration=calibration, in_detail=False
        )

    @cache
    def bounds(sizes: tuple[int, ...], micro_batches: tuple[int, ...]) -> GenerationFloors:
        here = share_of(calibrated_machine(machine, of_generations(calibration)), num_ranks=num_replicas)
        held = goal.pins.kv_cache.prefix_tokens
        return GenerationFloors(profile, coarse_share, here, sizes=sizes, micro_batches=micro_batches, prefix_tokens=held)

    def floors(plan: GenerationPlan, sizes: Sequence[int], micro_batches: Sequence[int]) -> Floors:
        numbers, is_free = tuple(micro_batches), goal.pins.num_micro_batches is None
        if goal.objective != "throughput" or not is_free or not set(numbers) <= set(MICRO_BATCHES):
            return bounds(tuple(sizes), numbers).floors_of(plan)
        # Of all numbers that other plans are asked about, since nearly all of the work is for shapes that they share.
        found = bounds(tuple(sizes), MICRO_BATCHES).floors_of(plan)
        rows = [MICRO_BATCHES.index(number) for number in numbers]
        return found if numbers == MICRO_BATCHES else found.of_rows(rows)

    @cache
    def in_detail(plan: GenerationPlan) -> GenerationPrediction:
        plan = laid_out(plan)
        prediction = estimate_generation(profile, plan=plan, workload=workload, machine=machine, calibration=calibration)
        return add_generation_memory(prediction, profile, plan=plan, workload=workload, machine=machine)

    def detail(plan: GenerationPlan, prediction: GenerationPrediction) -> GenerationPrediction:
        """Baselines may be one plan, and the chosen one."""
        return in_detail(plan)

    return GenerationProblem(
        workload=share,
        goal=goal,
        **budgets_elsewhere(machine, host_bytes=goal.host_budget_bytes, disk_bytes=goal.disk_budget_bytes),
        price=cache(price),
        detail=detail,
        floors=floors,
        can_cut_prompts=profile.prefill.length_multiple == 1,
        can_attend_on_host=profile.on_host is not None,
        find_model_conflict=partial(find_prefix_conflict, profile),
        find_load=lambda plan: estimate_generation_load(profile, plan=laid_out(plan), machine=machine),
        longest_prefix=0 if profile.rebuild is None else coarse.prompt_length,
        has_copies_beside=machine.device.kind != "cpu",
        unavailable=list_unavailable(machine),
        representations=list_representations(profile.representations, machine),
    )


def search_generation(
    problem: GenerationProblem,
    *,
    profile: GenerationProfile | None = None,
    machine: Machine | None = None,
    weights: WeightsPlan | None = None,
) -> GenerationSearchResult:
    """profile and machine: for what is said of techniques that are left out. weights: of the baselines.

    Raises NoFeasiblePlan, and InvalidPlan where nothing can keep the goal's pins.
    """
    check_generation_pins(problem)
    book = Book(problem=problem)
    solution = solve(book)
    if solution is None:
        raise explain_nothing_fits(problem)
    baselines = price_generation_baselines(Book(problem=problem), weights=weights)
    quickest_s = min((each.prediction.total_s for each in baselines.values() if each.verdict in ACCEPTED), default=inf)
    solution = replace(solution, plan=spread_evenly(book, solution.plan, at_most_s=quickest_s))
    chosen, solution = _first_on_the_card(problem, solution)
    return GenerationSearchResult(
        chosen=chosen,
        baselines=baselines,
        frontier=generation_frontier(book),
        bound=solution.bound,
        gap=_gap(problem, chosen, solution.bound),
        explanation=tuple(explain_choice(problem, chosen, profile=profile, machine=machine)),
    )


def find_best_generation(problem: GenerationProblem) -> PricedGenerationPlan:
    """The best plan alone. Raises NoFeasiblePlan, and InvalidPlan for pins that none can keep."""
    check_generation_pins(problem)
    book = Book(problem=problem)
    solution = solve(book)
    if solution is None:
        raise explain_nothing_fits(problem)
    return _first_on_the_card(problem, replace(solution, plan=spread_evenly(book, solution.plan)))[0]


def _first_on_the_card(problem: GenerationProblem, found: Solution) -> tuple[PricedGenerationPlan, Solution]:
    """The best plan whose whole process has room on the card (``search/check/card_fit.py``). Raises NoFeasiblePlan where
    none is left."""

    def within(budget_bytes: int) -> CardFit[PricedGenerationPlan, Solution] | None:
        smaller = solve(Book(problem=problem.with_budget(budget_bytes)))
        return None if smaller is None else CardFit(chosen=_with_room(problem, smaller.plan), source=smaller)

    first = CardFit(chosen=_with_room(problem, found.plan), source=found)
    best = find_room(first, budget_bytes=problem.goal.device_budget_bytes, within=within)
    if best is not None:
        return best.chosen, best.source
    smallest = _with_room(problem, find_smallest(problem))
    if smallest.verdict in ACCEPTED:
        return smallest, found
    raise explain_nothing_fits(problem)


def _with_room(problem: GenerationProblem, plan: GenerationPlan) -> PricedGenerationPlan:
    """With segments that grow where the card has room for the plan only so: there are fewer gaps between tensors then."""
    chosen = problem.priced("chosen", plan)
    memory = chosen.prediction.memory
    if chosen.verdict in ACCEPTED or memory is None or not memory.total_bytes:
        return chosen
    if problem.goal.pins.allocator.expandable_segments is not None:
        return chosen
    growing = problem.priced("chosen", replace(plan, allocator=AllocatorPlan(expandable_segments=True)))
    return growing if growing.verdict in ACCEPTED else chosen


def _gap(problem: GenerationProblem, chosen: PricedGenerationPlan, bound: float) -> float:
    prediction = problem.price(chosen.plan)
    values = {
        "throughput": prediction.total_s,
        "first_token": prediction.prefill_ms,
        "largest_batch": -float(chosen.plan.batch_size),
    }
    return abs(values[problem.goal.objective] / bound - 1)


def _coarse(workload: GenerationWorkload, *, max_sequence_length: int) -> GenerationWorkload:
    """With few lengths, each prompt's own or the next larger of them: no less memory, and nearly the same time."""
    ordered = sorted(workload.prompt_lengths)
    if len(set(ordered)) <= _MAX_LENGTHS:
        return workload
    levels = [ordered[len(ordered) * place // _MAX_LENGTHS - 1] for place in range(1, _MAX_LENGTHS + 1)]
    lengths = [levels[bisect_left(levels, length)] for length in workload.prompt_lengths]
    # No longer than leaves room for the tokens that its own prompt asks for.
    for index, num_new in enumerate(workload.new_token_counts):
        lengths[index] = min(lengths[index], max_sequence_length - num_new)
    return replace(workload, prompt_lengths=tuple(lengths))
