"""``estimate_model_generation``: from a model and a machine to what a batch generation takes, with reasons. Torch-free.

A model that was never seen is traced by a child process, and its profile is kept (``profile/keep/obtain.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.api.inputs import BEST, check_one_device
from optimizer.api.needs import check_plan_label, needed_representations
from optimizer.base.errors import NoFeasiblePlan
from optimizer.base.serialize import WithJson
from optimizer.estimate.explanation import Explanation
from optimizer.estimate.generation.explanation import explain_generation
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.prediction import Verdict
from optimizer.goal import GenerationGoal
from optimizer.hardware.machine import Machine
from optimizer.models.spec import ModelSpec
from optimizer.plan.explain.generation import explain_generation_plan
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.keep.obtain import obtain_generation_profile
from optimizer.search.generation.baselines import price_generation_baselines
from optimizer.search.generation.one_device import generation_problem, search_generation
from optimizer.search.generation.problem import GenerationProblem, PricedGenerationPlan
from optimizer.search.generation.solve import Book
from optimizer.workload import GenerationWorkload


@dataclass(frozen=True, kw_only=True)
class GenerationEstimate(WithJson):
    """One plan or two, priced on one machine for one workload, and the last of them explained."""

    model_type: str
    num_blocks: int
    machine: Machine
    workload: GenerationWorkload
    goal: GenerationGoal
    host_budget_bytes: int
    """The goal's, or what the machine has."""
    plans: tuple[PricedGenerationPlan, ...]
    """The plan asked for; where none was, weights resident, and after it the best plan where there is one."""
    nothing_fits: str | None
    """The reason where the best plan was looked for and none fits, with the smallest peak found."""
    explanation: Explanation
    """Reasons for the peak of the last of ``plans``."""
    sentences: tuple[str, ...]
    """The last of ``plans`` in sentences."""
    unread: tuple[str, ...] = ()
    """Settings of the config that this estimate does not cover (``models/unread.py``)."""

    @property
    def priced(self) -> PricedGenerationPlan:
        """The last of ``plans``."""
        return self.plans[-1]

    @property
    def prediction(self) -> GenerationPrediction:
        return self.priced.prediction

    @property
    def verdict(self) -> Verdict:
        return self.priced.verdict


def estimate_model_generation(
    spec: ModelSpec,
    *,
    plan: GenerationPlan | str | None,
    workload: GenerationWorkload,
    machine: Machine,
    goal: GenerationGoal | None = None,
    weights: WeightsPlan | None = None,
    calibration: Mapping[str, Any] | None = None,
    profiles_folder: Path | None = None,
) -> GenerationEstimate:
    """plan: a plan, a baseline's label, ``best``; None for resident weights and the best beside it. goal: what the verdict and
    the search honour; the device's whole memory and nothing lossy unless given. weights: of a baseline, instead of fp32.
    profiles_folder: where profiles are kept, instead of the usual place.

    Raises InvalidPlan and InvalidWorkload before anything is traced, InvalidModel where the model cannot be, NoFeasiblePlan for
    ``best`` where nothing fits.
    """
    goal = goal or GenerationGoal(device_budget_bytes=machine.device.memory_bytes)
    check_plan_label(plan)
    asked = plan if isinstance(plan, GenerationPlan) else GenerationPlan(weights=weights or WeightsPlan())
    asked.check(workload=workload, max_sequence_length=spec.max_sequence_length)
    profile = obtain_generation_profile(
        spec, representations=needed_representations(plan, goal=goal, weights=weights), folder=profiles_folder
    )
    return estimate_generation_profiled(
        profile, plan=plan, workload=workload, machine=machine, goal=goal, weights=weights, calibration=calibration
    )


def estimate_generation_profiled(
    profile: GenerationProfile,
    *,
    plan: GenerationPlan | str | None,
    workload: GenerationWorkload,
    machine: Machine,
    goal: GenerationGoal,
    weights: WeightsPlan | None = None,
    calibration: Mapping[str, Any] | None = None,
) -> GenerationEstimate:
    """``estimate_model_generation`` with a profile at hand."""
    check_plan_label(plan)
    if not isinstance(plan, GenerationPlan):
        check_one_device(goal)
    asked = plan if isinstance(plan, GenerationPlan) else GenerationPlan(weights=weights or WeightsPlan())
    asked.check(workload=workload, max_sequence_length=profile.max_sequence_length)
    problem = generation_problem(profile, workload=workload, goal=goal, machine=machine, calibration=calibration)
    plans, sentences, nothing_fits = _price(problem, plan, weights, profile=profile, machine=machine)
    last = plans[-1]
    return GenerationEstimate(
        model_type=profile.model_type,
        num_blocks=profile.num_blocks,
        machine=machine,
        workload=workload,
        goal=goal,
        host_budget_bytes=problem.host_budget_bytes,
        plans=plans,
        nothing_fits=nothing_fits,
        explanation=explain_generation(profile, plan=last.plan, workload=workload, prediction=last.prediction),
        sentences=sentences,
    )


_Priced = tuple[tuple[PricedGenerationPlan, ...], tuple[str, ...], str | None]
"""Plans, sentences of the last, and why nothing fits."""


def _price(
    problem: GenerationProblem,
    plan: GenerationPlan | str | None,
    weights: WeightsPlan | None,
    *,
    profile: GenerationProfile,
    machine: Machine,
) -> _Priced:
    if isinstance(plan, GenerationPlan):
        return _explained(problem, problem.priced("given", plan), nothing_fits=None)
    if plan is not None and plan != BEST:
        found = price_generation_baselines(Book(problem=problem), weights=weights, labels=(plan,))
        return _explained(problem, found[plan], nothing_fits=None)
    try:
        result = search_generation(problem, profile=profile, machine=machine, weights=weights)
    except NoFeasiblePlan as error:
        if plan == BEST:
            raise
        found = price_generation_baselines(Book(problem=problem), weights=weights, labels=("resident",))
        return _explained(problem, found["resident"], nothing_fits=error.message)
    first = () if plan == BEST else (result.baselines["resident"],)
    return (*first, result.chosen), result.explanation, None


def _explained(problem: GenerationProblem, priced: PricedGenerationPlan, *, nothing_fits: str | None) -> _Priced:
    sentences = explain_generation_plan(priced.plan, workload=problem.workload, prediction=priced.prediction)
    return (priced,), tuple(sentences), nothing_fits
