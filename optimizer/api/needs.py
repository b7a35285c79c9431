"""Finds how much of a model's profile a question needs, and obtains it: a child process traces what is missing."""

from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Final, NoReturn, get_args

from optimizer.api.compiled_needs import compiled_representations
from optimizer.api.inputs import BEST, Model, read_model
from optimizer.api.shared_needs import list_sharing, obtain_parts, with_narrower
from optimizer.base.errors import InvalidInput
from optimizer.goal import GenerationGoal, Goal
from optimizer.models.spec import ModelSpec
from optimizer.models.targets import check_targets
from optimizer.plan.activations import COMPILED
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import FrozenFormat, WeightsDtype, WeightsPlan
from optimizer.profile.extent import EVERYTHING, Extent, traced_representation
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.keep.obtain import obtain_generation_profile
from optimizer.profile.plan_extent import extent_of_plans
from optimizer.profile.profile import BLOCK_CHOICES, Profile
from optimizer.search.answer.baselines import BASELINES
from optimizer.search.generation.baselines import GENERATION_BASELINES
from optimizer.search.problem import SearchProblem, divisors
from optimizer.search.questions.sizes import sizes_looked_at
from optimizer.workload import GenerationWorkload, TrainingWorkload

_COMPUTED = ("fp32", "bf16", "fp32+bf16")
_PACKED: Final = tuple(form for form in get_args(FrozenFormat) if form != "same")


def profile_for(spec: ModelSpec, *, workload: TrainingWorkload, goal: Goal, folder: Path | None = None) -> Profile:
    """The model's profile, as far as finding the best plan for the goal needs it, with those of parts of its blocks."""
    if workload.adapter is not None:
        check_targets(workload.adapter, spec.model_type)
    extent = needed_extent(spec.num_blocks, BEST, workload=workload, goal=goal)
    sizes = sizes_looked_at(goal.objective, spec.max_sequence_length, workload)
    if sizes and extent != EVERYTHING:
        extent = extent.union(Extent(representations=(), choices=(), shapes=tuple(sizes)))
    numbers = (1, *list_sharing(spec, workload, goal))
    whole, *narrower = obtain_parts(spec, numbers, workload=workload, extent=extent, folder=folder)
    return with_narrower(whole, narrower)


def generation_profile_for(
    model: Model,
    *,
    workload: GenerationWorkload,
    goal: GenerationGoal,
    plans: Iterable[str | GenerationPlan] = (),
    folder: Path | None = None,
) -> GenerationProfile:
    """The model's profile, as far as finding the best plan for the goal, and pricing ``plans``, needs it."""
    spec = model if isinstance(model, ModelSpec) else read_model(model)
    GenerationPlan().check(workload=workload, max_sequence_length=spec.max_sequence_length)
    needed = {form for plan in (BEST, *plans) for form in needed_representations(plan, goal=goal)}
    return obtain_generation_profile(spec, representations=sorted(needed), folder=folder)


def needed_extent(
    num_blocks: int,
    plan: str | Plan | None,
    *,
    workload: TrainingWorkload,
    goal: Goal,
    weights: WeightsPlan | None = None,
    with_knobs: bool = False,
) -> Extent:
    """The extent of a profile that the question needs."""
    asked = "fp32" if weights is None else traced_representation(weights.representation)
    if with_knobs or (plan in (None, BEST) and goal.allow_lossy):
        if workload.adapter is not None and goal.pins.kernels.blocks != "compiled":
            return EVERYTHING
        return _extent_of_search(_with_compiled(_COMPUTED, workload, goal), workload)
    if isinstance(plan, Plan):
        return extent_of_plans([plan], workload=workload)
    if plan in (None, BEST):
        return _extent_of_search(tuple({"fp32": None, asked: None}), workload)
    try:
        baseline = baseline_plan(str(plan), _unpriced(num_blocks, workload, goal), weights)
        return extent_of_plans([baseline], workload=workload)
    except _Unpriced:
        return _extent_of_search(tuple({"fp32": None, asked: None}), workload)


def _extent_of_search(representations: tuple[str, ...], workload: TrainingWorkload) -> Extent:
    sizes = {1, *divisors(workload.global_batch_size)}
    return Extent(
        representations=representations,
        choices=BLOCK_CHOICES,
        shapes=tuple((size, workload.sequence_length) for size in sorted(sizes)),
    )


def _with_compiled(representations: tuple[str, ...], workload: TrainingWorkload, goal: Goal) -> tuple[str, ...]:
    """Those of a search whose goal pins compiled blocks, too, as far as other pins leave them open."""
    names = compiled_representations(workload, goal.pins, goal.may_use)
    return (*dict.fromkeys((*representations, *names)), *(name + COMPILED for name in names))


class _Unpriced(Exception):
    """A baseline asked for a price before there was a profile."""


def _unpriced(num_blocks: int, workload: TrainingWorkload, goal: Goal) -> SearchProblem:
    def price(plan: Plan) -> NoReturn:
        raise _Unpriced

    return SearchProblem(num_blocks=num_blocks, workload=workload, goal=goal, host_budget_bytes=0, price=price)


def baseline_plan(label: str, problem: SearchProblem, weights: WeightsPlan | None) -> Plan:
    setting, per_block = BASELINES[label](problem)
    if weights is not None:
        setting = replace(setting, dtype=weights.dtype, autocast=weights.autocast, frozen=weights.frozen)
    plan = setting.plan(per_block)
    conflict = problem.find_conflict(plan)
    if conflict is not None:
        raise conflict
    return plan


def needed_representations(
    plan: GenerationPlan | str | None, *, goal: GenerationGoal, weights: WeightsPlan | None = None
) -> list[str]:
    """The representations of weights that must have been profiled for the question."""
    if isinstance(plan, GenerationPlan):
        return [traced_representation(plan.weights.representation)]
    asked = (weights or WeightsPlan()).representation
    if plan not in (None, BEST) or not goal.allow_lossy:
        return sorted({"fp32", traced_representation(asked)})
    dtypes: list[WeightsDtype] = ["fp32", *(() if {"bf16", "fp16"} <= set(goal.forbid) else ("bf16",))]
    packed = () if "quantize_frozen" in goal.forbid else tuple(form for form in _PACKED if _can_pack(form))
    pairs = product(goal.pins.among("weights.dtype", dtypes), goal.pins.among("weights.frozen", ("same", *packed)))
    forms = [traced_representation(WeightsPlan(dtype=dtype, frozen=form).representation) for dtype, form in pairs]
    # plain fp32 whatever is held, for the baselines
    return sorted({"fp32", *forms, traced_representation(asked)})


def check_plan_label(plan: GenerationPlan | str | None) -> None:
    """Raise InvalidInput for a text that names no plan."""
    allowed = [BEST, *GENERATION_BASELINES]
    if isinstance(plan, str) and plan not in allowed:
        raise InvalidInput(
            f"plan {plan!r} is not one of {', '.join(allowed)}", field="plan", value=plan, allowed=allowed
        )


def _can_pack(form: str) -> bool:
    return form != "nf4" or find_spec("bitsandbytes") is not None
