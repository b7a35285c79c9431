"""Answers the questions of ``headroom plan``, as functions: the best plan for a goal, plans side by side, cards ranked,
a plan edited.

Torch-free. ``..._model`` takes a config, a preset's name or a ModelSpec, and traces it in a child where it was not seen before,
as ``estimate_model`` does; ``..._profiled`` has the profile at hand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from optimizer.api.inputs import BEST, Model, check_goal_devices, check_number_compared, known_machine, read_model
from optimizer.api.needs import baseline_plan, profile_for
from optimizer.api.try_compiled import try_compiled
from optimizer.base.errors import InvalidInput, NoFeasiblePlan
from optimizer.base.heap import without_collections
from optimizer.goal import UNLIMITED_BYTES, Goal
from optimizer.hardware.devices import Beside
from optimizer.hardware.machine import Machine
from optimizer.hardware.rental import PriceList, read_prices
from optimizer.models.spec import ModelSpec
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.plan.pins.training import Pins, read_pins
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.search.answer.baselines import BASELINES
from optimizer.search.answer.compare import Comparison, Repriced, compare_plans, reprice
from optimizer.search.core import search
from optimizer.search.problem import SearchProblem
from optimizer.search.questions.alternatives import add_ways_out
from optimizer.search.questions.answers import ObjectiveAnswer
from optimizer.search.questions.cards import ALL, CardAnswer, Order, Progress, beside_in, rank_cards, read_cards
from optimizer.search.questions.layouts import answer_layouts
from optimizer.search.questions.objectives import answer_goal
from optimizer.search.questions.uneven.answer import answer_uneven
from optimizer.search.questions.ways import Obtain
from optimizer.search.training import training_problem
from optimizer.workload import TrainingWorkload


def plan_model(
    model: Model,
    *,
    machine: str | Machine,
    workload: TrainingWorkload | None = None,
    goal: Goal | None = None,
    profiles_folder: Path | None = None,
) -> ObjectiveAnswer:
    """The best plan for the goal's objective; of the whole card, lossless and fastest unless a goal is given.

    machine: a card's name, or a measured one. Raises InvalidInput and what is below it for anything that was asked wrongly, and
    NoFeasiblePlan, whose ``fields["ways_out"]`` are what would fit, priced.
    """
    spec = model if isinstance(model, ModelSpec) else read_model(model)
    workload, target = workload or TrainingWorkload(), known_machine(machine, num_devices=goal.num_devices if goal else 1)
    goal = goal or Goal(device_budget_bytes=target.device.memory_bytes)
    profile = profile_for(spec, workload=workload, goal=goal, folder=profiles_folder)

    def obtain(workload: TrainingWorkload, goal: Goal) -> Profile:
        return profile_for(spec, workload=workload, goal=goal, folder=profiles_folder)

    answer = plan_profiled(profile, machine=target, workload=workload, goal=goal, obtain=obtain)

    def answer_with(other: Goal) -> ObjectiveAnswer:
        found = profile_for(spec, workload=workload, goal=other, folder=profiles_folder)
        return plan_profiled(found, machine=target, workload=workload, goal=other, with_ways_out=False)

    return try_compiled(answer, answer_with, profile=profile, goal=goal, machine=target)


@without_collections()
def plan_profiled(
    profile: Profile,
    *,
    machine: Machine,
    workload: TrainingWorkload,
    goal: Goal,
    calibration: Mapping[str, Any] | None = None,
    prices: PriceList | None = None,
    obtain: Obtain | None = None,
    with_ways_out: bool = True,
) -> ObjectiveAnswer:
    """``plan_model`` with a profile at hand.

    with_ways_out: where nothing fits, price what would. obtain: for that, more of the model's profile, or the one with adapters;
    without it only what this profile holds is priced.
    """

    if machine.others:
        check_goal_devices(goal, machine)
        return answer_uneven(
            profile, workload, goal, machine=machine, make_problem=training_problem, calibration=calibration
        )
    if goal.num_devices > 1:
        check_goal_devices(goal, machine)
        on_layout = partial(_pose, goal=goal, machine=machine, calibration=calibration)
        return answer_layouts(
            lambda layout: partial(on_layout, layout=layout),
            profile,
            workload,
            goal,
            answer_one=answer_goal,
            num_within=machine.num_within,
        )

    def pose(profile: Profile, workload: TrainingWorkload, goal: Goal = goal, machine: Machine = machine) -> SearchProblem:
        problem = training_problem(profile, workload=workload, goal=goal, machine=machine, calibration=calibration)
        return replace(problem, names_ways=not with_ways_out)

    try:
        return answer_goal(pose, profile, workload)
    except NoFeasiblePlan as error:
        if not with_ways_out:
            raise
        raise add_ways_out(
            error,
            pose,
            obtain=obtain or (lambda asked, _: profile if asked.adapter == workload.adapter else None),
            workload=workload,
            goal=goal,
            machine=machine,
            prices=prices or read_prices(),
        ) from None


def _pose(
    profile: Profile,
    workload: TrainingWorkload,
    *,
    goal: Goal,
    machine: Machine,
    calibration: Mapping[str, Any] | None,
    layout: DeviceLayout,
) -> SearchProblem:
    return training_problem(
        profile, workload=workload, goal=goal, machine=machine, calibration=calibration, layout=layout
    )


def largest_of_models(
    models: Sequence[Model],
    *,
    machine: str | Machine,
    workload: TrainingWorkload | None = None,
    goal: Goal | None = None,
    profiles_folder: Path | None = None,
) -> tuple[Model, ObjectiveAnswer]:
    """Find among several models the one with the most trained parameters that fits, and its fastest plan.

    The largest is tried first. Raises NoFeasiblePlan, the smallest model's, where none fits.
    """
    if not models:
        raise InvalidInput("no models are named; allowed: one or more", field="models", value=0)
    workload, target = workload or TrainingWorkload(), known_machine(machine)
    goal = replace(goal or Goal(device_budget_bytes=target.device.memory_bytes), objective="fastest_step")
    specs = [(model, model if isinstance(model, ModelSpec) else read_model(model)) for model in models]
    profiles = [
        (model, profile_for(spec, workload=workload, goal=goal, folder=profiles_folder)) for model, spec in specs
    ]
    profiles.sort(key=lambda pair: -pair[1].num_parameters)
    for model, profile in profiles:
        try:
            return model, plan_profiled(profile, machine=target, workload=workload, goal=goal, with_ways_out=False)
        except NoFeasiblePlan as error:
            nothing_fits = error
    raise nothing_fits


def compare_model(
    model: Model,
    plans: Mapping[str, str | Plan],
    *,
    machine: str | Machine,
    workload: TrainingWorkload | None = None,
    goal: Goal | None = None,
    profiles_folder: Path | None = None,
) -> Comparison:
    """Plans side by side. plans: by the name to show, a plan, a baseline's label or ``best``."""
    spec = model if isinstance(model, ModelSpec) else read_model(model)
    workload, target = workload or TrainingWorkload(), known_machine(machine)
    goal = goal or Goal(device_budget_bytes=target.device.memory_bytes)
    wide = replace(goal, allow_lossy=goal.allow_lossy or any(isinstance(plan, Plan) for plan in plans.values()))
    profile = profile_for(spec, workload=workload, goal=wide, folder=profiles_folder)
    return compare_profiled(profile, plans, machine=target, workload=workload, goal=goal)


def compare_profiled(
    profile: Profile,
    plans: Mapping[str, str | Plan],
    *,
    machine: Machine,
    workload: TrainingWorkload,
    goal: Goal,
    calibration: Mapping[str, Any] | None = None,
) -> Comparison:
    """``compare_model`` with a profile at hand."""
    problem = training_problem(profile, workload=workload, goal=goal, machine=machine, calibration=calibration)
    labelled = {name: plan if isinstance(plan, Plan) else _plan_called(plan, problem) for name, plan in plans.items()}
    check_number_compared(len(labelled))
    return compare_plans(problem, labelled)


def rank_model_cards(
    model: Model,
    cards: Sequence[str] = (ALL,),
    *,
    workload: TrainingWorkload | None = None,
    goal: Goal | None = None,
    order: Order = "speed",
    prices: PriceList | None = None,
    profiles_folder: Path | None = None,
    progress: Progress | None = None,
    beside: Beside | None = None,
) -> tuple[CardAnswer, ...]:
    """Cards of the table by tokens per second, or by the rent of a million tokens. Without a goal each with all its memory.

    progress: called with each card before it is looked at. beside: the host and the disk that each is taken to have.
    """
    spec = model if isinstance(model, ModelSpec) else read_model(model)
    workload, goal = workload or TrainingWorkload(), goal or Goal(device_budget_bytes=UNLIMITED_BYTES)
    profile = profile_for(spec, workload=workload, goal=goal, folder=profiles_folder)
    return rank_cards_profiled(
        profile, cards, workload=workload, goal=goal, order=order, prices=prices, progress=progress, beside=beside
    )


def rank_cards_profiled(
    profile: Profile,
    cards: Sequence[str],
    *,
    workload: TrainingWorkload,
    goal: Goal,
    order: Order = "speed",
    prices: PriceList | None = None,
    calibration: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    beside: Beside | None = None,
) -> tuple[CardAnswer, ...]:
    """``rank_model_cards`` with a profile at hand."""

    def pose(goal: Goal, machine: Machine) -> SearchProblem:
        return training_problem(profile, workload=workload, goal=goal, machine=machine, calibration=calibration)

    found = read_cards(cards, beside=beside_in(goal) | (beside or {}))
    prices = prices or read_prices()
    return rank_cards(pose, found, goal=goal, workload=workload, prices=prices, order=order, progress=progress)


def reprice_profiled(
    profile: Profile,
    plan: Plan,
    *,
    change: Pins | Sequence[str],
    machine: Machine,
    workload: TrainingWorkload,
    goal: Goal,
    calibration: Mapping[str, Any] | None = None,
) -> Repriced:
    """The plan after one edit. change: as pins, or as their text: ``["optimizer_state.bits=8"]``."""
    problem = training_problem(profile, workload=workload, goal=goal, machine=machine, calibration=calibration)
    return reprice(problem, plan, change=change if isinstance(change, Pins) else read_pins(change))


def _plan_called(name: str, problem: SearchProblem) -> Plan:
    if name == BEST:
        return search(problem).chosen.plan
    if name not in BASELINES:
        allowed = [BEST, *BASELINES]
        raise InvalidInput(
            f"plan {name!r} is not one of {', '.join(allowed)}", field="compare", value=name, allowed=allowed
        )
    return baseline_plan(name, problem, None)
