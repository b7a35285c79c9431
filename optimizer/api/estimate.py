"""``estimate_model``: from a model's configuration and a card's name to a plan's bytes and milliseconds. Torch-free.

What ``headroom estimate`` prints and a notebook asks for. A model that was never seen is traced by a child process, as far as the
question needs it, and its profile is kept (``profile/keep/obtain.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optimizer.api.inputs import BEST, read_config, read_model
from optimizer.api.needs import baseline_plan, needed_extent
from optimizer.api.shared_needs import obtain_parts, with_narrower
from optimizer.base.errors import InvalidInput, NoFeasiblePlan
from optimizer.base.serialize import WithJson
from optimizer.base.shown import shown_value
from optimizer.estimate.explanation import Explanation, explain_prediction
from optimizer.estimate.prediction import Prediction
from optimizer.goal import Goal
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Machine
from optimizer.models.spec import ModelSpec
from optimizer.models.targets import check_targets
from optimizer.models.unread import describe_unread
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.keep.obtain import ProfileSource
from optimizer.profile.profile import Profile
from optimizer.search.answer.baselines import BASELINES
from optimizer.search.answer.knobs import Knob, list_knobs
from optimizer.search.core import search
from optimizer.search.problem import PricedPlan, SearchProblem
from optimizer.search.training import training_problem
from optimizer.workload import TrainingWorkload


@dataclass(frozen=True, kw_only=True)
class Estimate(WithJson):
    """One plan or two, priced on one machine for one workload, and the last of them explained."""

    model_type: str
    num_blocks: int
    num_parameters: int
    """Trained ones."""
    machine: Machine
    workload: TrainingWorkload
    goal: Goal
    host_budget_bytes: int
    """The goal's, or what the machine has."""
    plans: tuple[PricedPlan, ...]
    """The plan asked for; without one plain training, and after it the fastest plan that fits where there is one."""
    nothing_fits: str | None
    """The reason where the fastest plan that fits was asked for and none does, with the smallest peak found."""
    explanation: Explanation
    """Reasons for the peak of the last of ``plans``."""
    knobs: tuple[Knob, ...]
    """The gain and cost of each single change of that plan; empty unless asked for."""
    unread: tuple[str, ...] = ()
    """Settings of the config that this estimate does not cover (``models/unread.py``)."""

    @property
    def priced(self) -> PricedPlan:
        """The last of ``plans``."""
        return self.plans[-1]


def estimate_model(
    model: str | Path | Mapping[str, Any] | ModelSpec,
    *,
    machine: str | Machine,
    workload: TrainingWorkload | None = None,
    plan: str | Plan | None = None,
    goal: Goal | None = None,
    weights: WeightsPlan | None = None,
    with_knobs: bool = False,
    profiles_folder: Path | None = None,
) -> Estimate:
    """model: a config.json, its folder or content, a preset's name, a ModelSpec. machine: a card's name, or a measured one.

    plan: a plan, a baseline's label, ``best``; None for plain training and the best beside it. goal: what the verdict and the
    search honour; the card's whole memory and nothing lossy unless given. weights: the dtype of a baseline, and of plain
    training, instead of fp32. with_knobs: price one-change neighbours too. profiles_folder: where profiles are kept.

    Raises InvalidInput and what is below it for anything that was asked wrongly, NoFeasiblePlan for ``best`` where nothing fits.
    """
    config = None if isinstance(model, ModelSpec) else read_config(model)
    spec = model if isinstance(model, ModelSpec) else read_model(model if config is None else config)
    workload = workload or TrainingWorkload()
    if not isinstance(workload, TrainingWorkload):
        raise InvalidInput(
            f"workload is of type {type(workload).__name__}; allowed: a TrainingWorkload",
            field="workload",
            allowed="a TrainingWorkload",
        )
    target = machine if isinstance(machine, Machine) else table_machine(machine)
    goal = goal or Goal(device_budget_bytes=target.device.memory_bytes)
    _check_label(plan)
    if workload.adapter is not None:
        check_targets(workload.adapter, spec.model_type)
    with ProfileSource(
        spec,
        adapter=workload.adapter,
        is_packed=workload.is_packed,
        objective=workload.objective,
        folder=profiles_folder,
    ) as source:
        extent = needed_extent(
            spec.num_blocks, plan, workload=workload, goal=goal, weights=weights, with_knobs=with_knobs
        )
        profile = source.read(extent)
    if isinstance(plan, Plan) and plan.layout.shares_blocks:
        narrower = obtain_parts(spec, (plan.layout.tensor,), workload=workload, extent=extent, folder=profiles_folder)
        profile = with_narrower(profile, narrower)
    estimate = estimate_profiled(
        profile, machine=target, workload=workload, plan=plan, goal=goal, weights=weights, with_knobs=with_knobs
    )
    return estimate if config is None else replace(estimate, unread=describe_unread(config, spec))


def estimate_profiled(
    profile: Profile,
    *,
    machine: Machine,
    workload: TrainingWorkload,
    goal: Goal,
    plan: str | Plan | None = None,
    weights: WeightsPlan | None = None,
    with_knobs: bool = False,
    calibration: Mapping[str, Any] | None = None,
) -> Estimate:
    """``estimate_model`` with a profile at hand: milliseconds, but for the search that ``best`` means."""
    _check_label(plan)
    problem = training_problem(profile, workload=workload, goal=goal, machine=machine, calibration=calibration)
    plans, nothing_fits = _price(problem, plan, weights)
    priced = plans[-1]
    explanation = explain_prediction(profile, plan=priced.plan, workload=workload, prediction=priced.prediction)
    knobs = list_knobs(problem, priced.plan, prediction=priced.prediction) if with_knobs else ()
    return Estimate(
        model_type=profile.model_type,
        num_blocks=profile.num_blocks,
        num_parameters=profile.num_parameters,
        host_budget_bytes=problem.host_budget_bytes,
        machine=machine,
        workload=workload,
        goal=goal,
        plans=plans,
        nothing_fits=nothing_fits,
        explanation=explanation,
        knobs=knobs,
    )


def _check_label(plan: str | Plan | None) -> None:
    allowed = [BEST, *BASELINES]
    if isinstance(plan, Plan) or plan is None or plan in allowed:
        return
    named = repr(plan) if isinstance(plan, str) else f"of type {type(plan).__name__}"
    raise InvalidInput(
        f"plan {named} is not one of {', '.join(allowed)}, nor a Plan", field="plan", value=shown_value(plan), allowed=allowed
    )


def _price(
    problem: SearchProblem, plan: str | Plan | None, weights: WeightsPlan | None
) -> tuple[tuple[PricedPlan, ...], str | None]:
    if isinstance(plan, Plan):
        plan.check(
            num_blocks=problem.num_blocks, workload=problem.workload, has_sparse_gradients=problem.has_sparse_gradients
        )
        return (_priced(problem, "given", plan),), None
    if plan is not None and plan != BEST:
        return (_priced(problem, plan, baseline_plan(plan, problem, weights)),), None
    plain = _priced(problem, "keep_all", baseline_plan("keep_all", problem, weights))
    try:
        chosen = search(problem).chosen
    except NoFeasiblePlan as error:
        if plan == BEST:
            raise
        return (plain,), error.message
    return ((chosen,) if plan == BEST else (plain, chosen)), None


def _priced(problem: SearchProblem, label: str, plan: Plan) -> PricedPlan:
    prediction: Prediction = problem.price(plan)
    return problem.priced(label, plan, prediction)
