"""``search_generation_plans``: the best plan of a batch generation on the devices of one machine: on one of them, in copies of
the model that share the prompts, or in one copy that is cut.

A model that fits on one device with all it needs is never cut: copies do the same work without waiting for each other. Where it
does not, a cut is weighed against copies, and against one device, that keep a part elsewhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from optimizer.base.errors import NoFeasiblePlan
from optimizer.base.units import format_bytes, format_duration, format_slowdown
from optimizer.estimate.bounds.generation_floor import GenerationFloors
from optimizer.goal import GenerationGoal
from optimizer.hardware.calibration import calibrated_machine, of_generations
from optimizer.hardware.machine import Machine
from optimizer.hardware.share import share_of
from optimizer.plan.devices.generation_layout import GenerationLayout
from optimizer.plan.explain.generation import explain_generation_plan
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.techniques import Technique
from optimizer.profile.generation import GenerationProfile
from optimizer.search.generation.baselines import price_generation_baselines
from optimizer.search.generation.one_device import (
    GenerationLayoutOption,
    GenerationSearchResult,
    generation_problem,
    search_generation,
)
from optimizer.search.generation.problem import GenerationProblem, PricedGenerationPlan
from optimizer.search.generation.solve import Book
from optimizer.search.generation.stages import find_cut, list_resident, value_of_devices
from optimizer.workload import GenerationWorkload

_WORTH: Final = 0.005
"""Share by which more devices must be better to be used: predictions are no finer."""
_ONE: Final = GenerationLayout()


@dataclass(kw_only=True)
class _Tried:
    """One layout, with what came of it."""

    layout: GenerationLayout
    result: GenerationSearchResult | None = None
    best: PricedGenerationPlan | None = None
    why_not: str = ""
    error: NoFeasiblePlan | None = None


def search_generation_plans(
    profile: GenerationProfile,
    *,
    workload: GenerationWorkload,
    goal: GenerationGoal,
    machine: Machine,
    calibration: Mapping[str, Any] | None = None,
) -> GenerationSearchResult:
    """The best plan on at most ``goal.num_devices`` devices that the goal allows and whose peak, upper end, honours the budgets.

    Raises NoFeasiblePlan with the smallest peak that was found and what it is made of, InvalidWorkload beyond the positions,
    InvalidPlan where nothing can keep the goal's pins.
    """
    here: dict[str, Any] = {"workload": workload, "goal": goal, "machine": machine, "calibration": calibration}
    GenerationPlan().check(workload=workload, max_sequence_length=profile.max_sequence_length)
    problem = generation_problem(profile, **here)
    if goal.num_devices == 1:
        return search_generation(problem, profile=profile, machine=machine)
    one = _on_one_device(problem, profile, machine)
    fits_whole = _fits_whole(problem)
    tried = [one, *(_copies(profile, number, here) for number in _numbers(goal, workload) if _may(goal, "share_prompts"))]
    tried += [_cut(problem, profile, number, fits_whole=fits_whole) for number in _numbers(goal, None)]
    best = _best_of(problem, tried)
    if best is None or best.best is None:
        assert one.error is not None
        raise one.error
    result = best.result or _result_of_cut(profile, best.best, problem, here)
    options = tuple(
        GenerationLayoutOption(layout=each.layout, best=each.best, sentence=_describe(each, best)) for each in tried
    )
    baselines = result.baselines if one.result is None else one.result.baselines
    sentences = (*result.explanation, *(option.sentence for option in options))
    return replace(result, chosen=best.best, baselines=baselines, layouts=options, explanation=sentences)


def describe_generation_layout(layout: GenerationLayout) -> str:
    """Words for a layout: ``2 devices, a copy of the model on each``."""
    if layout.is_cut:
        return f"{layout.num_devices} devices, the model cut into {' + '.join(map(str, layout.stage_blocks))} blocks"
    return "one device" if layout.num_replicas == 1 else f"{layout.num_replicas} devices, a copy of the model on each"


# What is tried.


def _numbers(goal: GenerationGoal, workload: GenerationWorkload | None) -> Sequence[int]:
    """Numbers of devices; no more than there are prompts, where each is to have some."""
    most = goal.num_devices if workload is None else min(goal.num_devices, workload.num_sequences)
    every = range(2, most + 1)
    # Between few and all of many devices little differs.
    return every if most <= 4 else sorted({2, 4, most // 2, most})


def _may(goal: GenerationGoal, technique: Technique) -> bool:
    return technique not in goal.forbid


def _fits_whole(problem: GenerationProblem) -> bool:
    return any(problem.fits(problem.price(plan)) for plan in list_resident(problem))


def _on_one_device(problem: GenerationProblem, profile: GenerationProfile, machine: Machine) -> _Tried:
    try:
        result = search_generation(problem, profile=profile, machine=machine)
    except NoFeasiblePlan as error:
        return _Tried(layout=_ONE, error=error, why_not=_smallest(error))
    return _Tried(layout=_ONE, result=result, best=result.chosen)


def _copies(profile: GenerationProfile, number: int, here: Mapping[str, Any]) -> _Tried:
    layout = GenerationLayout(num_replicas=number)
    problem = generation_problem(profile, **here, num_replicas=number)
    try:
        result = search_generation(problem)
    except NoFeasiblePlan as error:
        return _Tried(layout=layout, why_not=_smallest(error))

    def laid_out(priced: PricedGenerationPlan) -> PricedGenerationPlan:
        return replace(priced, plan=replace(priced.plan, layout=layout))

    chosen = laid_out(result.chosen)
    words = f"{describe_generation_layout(layout)}; what follows is of each, with its share of the prompts"
    result = replace(
        result,
        chosen=chosen,
        frontier=tuple(map(laid_out, result.frontier)),
        explanation=(words, *result.explanation),
    )
    return _Tried(layout=layout, result=result, best=chosen)


def _cut(problem: GenerationProblem, profile: GenerationProfile, number: int, *, fits_whole: bool) -> _Tried:
    layout = GenerationLayout(stage_blocks=(1,) * number)
    if not _may(problem.goal, "cut_model"):
        return _Tried(layout=layout, why_not="forbidden")
    if fits_whole:
        return _Tried(layout=layout, why_not="not tried, since the model fits on one device with all it needs")
    if any(held.ends is None for held in profile.weights.values()):
        return _Tried(layout=layout, why_not="not possible, since blocks of this model share weights")
    best = find_cut(problem, num_blocks=profile.num_blocks, num_devices=number)
    if best is None:
        return _Tried(layout=layout, why_not="nothing fits, with all weights and all keys and values on the devices")
    return _Tried(layout=best.plan.layout, best=best)


def _smallest(error: NoFeasiblePlan) -> str:
    return f"nothing fits; the smallest peak is {format_bytes(int(error.fields['smallest_feasible_bytes']))}"


# The answer.


def _best_of(problem: GenerationProblem, tried: Sequence[_Tried]) -> _Tried | None:
    """The best; of those that are as good the one with the fewest devices."""
    found = [
        (value_of_devices(problem, each.best.plan, each.best.prediction)[0], each) for each in tried if each.best is not None
    ]
    if not found:
        return None
    least = min(value for value, _ in found)
    as_good = [each for value, each in found if value <= least + abs(least) * _WORTH]
    return min(as_good, key=lambda each: each.layout.num_devices)


def _result_of_cut(
    profile: GenerationProfile, best: PricedGenerationPlan, problem: GenerationProblem, here: Mapping[str, Any]
) -> GenerationSearchResult:
    bound = _bound_of_cut(profile, best.plan, here)
    value = value_of_devices(problem, best.plan, best.prediction)[0]
    prediction = best.prediction
    return GenerationSearchResult(
        chosen=best,
        baselines=price_generation_baselines(Book(problem=problem)),
        frontier=(best,),
        bound=value if problem.goal.objective != "throughput" else bound,
        gap=abs(value / bound - 1) if problem.goal.objective == "throughput" else 0.0,
        explanation=tuple(explain_generation_plan(best.plan, workload=problem.workload, prediction=prediction)),
    )


def _bound_of_cut(profile: GenerationProfile, plan: GenerationPlan, here: Mapping[str, Any]) -> float:
    """No cut over so many devices with weights in this form takes fewer seconds: what one device computes at its best batch,
    shared by all without a wait.
    """
    machine = calibrated_machine(here["machine"], of_generations(here["calibration"]))
    number = plan.layout.num_devices
    own = share_of(machine, num_ranks=number)
    workload: GenerationWorkload = here["workload"]
    sizes = tuple(sorted({1, plan.batch_size, workload.num_sequences}))
    floors = GenerationFloors(profile, workload, own, sizes=sizes, micro_batches=(1,))
    return float(floors.floors_of(replace(plan, layout=_ONE)).total_s.min()) / number


def _describe(each: _Tried, best: _Tried) -> str:
    """A comparison of a layout with the best, in a sentence."""
    assert best.best is not None
    name = describe_generation_layout(each.layout)
    if each.best is None:
        cut = f"{each.layout.num_devices} devices, the model cut" if each.layout.is_cut else name
        return f"{cut}: {each.why_not}"
    took = format_duration(each.best.prediction.total_s)
    if each is best:
        return f"{name}: chosen, {took} in all"
    times = each.best.prediction.total_s / best.best.prediction.total_s
    return f"{name}: {format_slowdown(times)}, {took} in all"
