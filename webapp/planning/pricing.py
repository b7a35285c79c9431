"""Prices specs: a search on each known machine, and what was found kept as offers.

Torch-free: a stored profile and the machines' measured rates are enough.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from django.db import transaction

from optimizer.base.errors import InvalidWorkload, NoFeasiblePlan
from optimizer.goal import Goal
from optimizer.hardware.machine import Machine as MachineSpec
from optimizer.plan.explain.training import explain_plan
from optimizer.search.problem import PricedPlan
from optimizer.workload import GenerationWorkload
from webapp.catalog.models import Machine, Profile
from webapp.catalog.queries import machines_visible_to
from webapp.jobs.specs.generation import GenerateSpec, generation_workload, read_job_spec
from webapp.jobs.specs.training import JobSpec
from webapp.planning.generation_searches import GenerationQuestion, explain_generation, find_generation
from webapp.planning.offers import FoundPlan, Offer, PlanAnswer, keep_offer
from webapp.planning.profiles import known_profiles_of, read_generation_profile, read_profile, ready_profile
from webapp.planning.searches import TrainingQuestion, find_answer, problem_of

if TYPE_CHECKING:
    from optimizer.search.questions.objectives import ObjectiveAnswer



def price_spec(user: Any, spec: dict[str, Any]) -> PlanAnswer:
    """Search on each machine and keep what was found as offers.

    Raises InvalidInput for the spec, ProfileFailed, and NoFeasiblePlan when nothing fits on any machine; its ``fields["offers"]``
    then holds the baselines, which are kept as offers too.
    """
    return price_job_spec(user, read_job_spec(user, spec))


def price_job_spec(user: Any, spec: JobSpec | GenerateSpec) -> PlanAnswer:
    from optimizer.hardware.rental import read_prices

    if isinstance(spec, JobSpec):
        _check_objective(spec.goal)
        profile = ready_profile(spec.model, adapter=spec.workload.adapter)
    else:
        profile = ready_profile(spec.model, generates=True)
    if profile is None:
        return PlanAnswer(profile="pending", waiting_for="profile")
    machines = list(machines_visible_to(user).order_by("name"))
    if not machines:
        return PlanAnswer(profile="pending", waiting_for="machine")
    if isinstance(spec, JobSpec):
        priced = [_search(spec, profile, machine) for machine in machines]
    else:
        workload = generation_workload(spec)
        priced = [_search_generation(spec, workload, profile, machine) for machine in machines]
    prices = read_prices()
    with transaction.atomic():
        offers = [keep_offer(user, spec, profile, found, prices) for result in priced for found in result.found]
    fitting = [offer for offer in offers if offer.row.label == "chosen"]
    chosen = min(fitting, key=_order_of(spec), default=None)
    if chosen is None:
        raise _nothing_fits([result.infeasible for result in priced if result.infeasible], offers)
    return PlanAnswer(profile="ready", offers=[_marked(offer, is_chosen=offer is chosen) for offer in offers])


def _check_objective(goal: Goal) -> None:
    """A job's work is given; the objectives that look for it are asked elsewhere."""
    if goal.objective not in ("fastest_step", "cheapest_run"):
        raise InvalidWorkload(
            f"goal.objective is {goal.objective}, which changes the work; a job's is given: fastest_step or cheapest_run",
            field="goal.objective",
            value=goal.objective,
            allowed=["fastest_step", "cheapest_run"],
            hint="POST /plans/best answers it with the workload to ask for.",
        )


def _order_of(spec: JobSpec | GenerateSpec) -> Callable[[Offer], tuple[bool, float, float]]:
    """By time; for the cheapest run by rent, machines without a price after those with one."""
    if not isinstance(spec, JobSpec):
        return lambda offer: (False, 0.0, float(offer.row.prediction["total_s"]))

    def order(offer: Offer) -> tuple[bool, float, float]:
        step_ms = float(offer.row.prediction["step_ms"])
        if spec.goal.objective != "cheapest_run":
            return False, 0.0, step_ms
        rent = next((cost.amount for cost in offer.costs if cost.kind == "rented"), None)
        return rent is None, rent or 0.0, step_ms

    return order


@dataclass(frozen=True, kw_only=True)
class LargestFit:
    """The largest batch or the longest sequence, on the machine where it is largest."""

    machine: Machine
    answer: "ObjectiveAnswer"


def find_largest_fit(user: Any, spec: JobSpec) -> LargestFit | PlanAnswer:
    """For an objective that looks for the work; a pending answer where nothing can be priced yet. Nothing is kept.

    Raises NoFeasiblePlan where not even the smallest size fits on any machine.
    """
    profile = ready_profile(spec.model, adapter=spec.workload.adapter)
    machines = list(machines_visible_to(user).order_by("name"))
    if profile is None or not machines:
        return PlanAnswer(profile="pending", waiting_for="profile" if profile is None else "machine")
    found: list[LargestFit] = []
    refused: list[NoFeasiblePlan] = []
    for machine in machines:
        question = question_of(spec, profile, machine)
        try:
            answer = find_answer(question, obtain=known_profiles_of(spec.model, question))
        except NoFeasiblePlan as error:
            refused.append(error)
        else:
            found.append(LargestFit(machine=machine, answer=answer))
    if not found:
        raise _nothing_fits(refused, [])
    return max(found, key=lambda most: 0 if most.answer.limit is None else most.answer.limit.largest)


@dataclass(frozen=True, kw_only=True)
class _Searched:
    found: list[FoundPlan]
    infeasible: NoFeasiblePlan | None = None


def _search(spec: JobSpec, profile: Profile, machine: Machine) -> _Searched:
    # here, so that numpy and scipy are loaded with the first price and not with every process that knows of jobs
    from optimizer.search.answer.baselines import price_baselines

    question = question_of(spec, profile, machine)
    try:
        result = find_answer(question, obtain=known_profiles_of(spec.model, question)).result
    except NoFeasiblePlan as error:
        return _Searched(found=_explained(price_baselines(problem_of(question)), machine), infeasible=error)
    chosen = FoundPlan(priced=result.chosen, machine=machine, explanation=list(result.explanation))
    return _Searched(found=[chosen, *_explained(result.baselines, machine)])


def question_of(spec: JobSpec, profile: Profile, machine: Machine) -> TrainingQuestion:
    return TrainingQuestion(
        profile=read_profile(profile.pk, profile.document_sha256),
        profile_sha256=profile.document_sha256,
        workload=spec.workload,
        goal=spec.goal,
        machine=MachineSpec.from_json(machine.document),
        calibration=machine.calibration,
    )


def _search_generation(
    spec: GenerateSpec, workload: GenerationWorkload, profile: Profile, machine: Machine
) -> _Searched:
    question = generation_question_of(spec, workload, profile, machine)
    answer = find_generation(question)
    found = [
        FoundPlan(priced=priced, machine=machine, explanation=explain_generation(question, priced))
        for priced in answer.baselines.values()
    ]
    if answer.chosen is None:
        return _Searched(found=found, infeasible=answer.nothing_fits.error() if answer.nothing_fits else None)
    chosen = FoundPlan(priced=answer.chosen, machine=machine, explanation=list(answer.explanation))
    return _Searched(found=[chosen, *found])


def generation_question_of(
    spec: GenerateSpec, workload: GenerationWorkload, profile: Profile, machine: Machine
) -> GenerationQuestion:
    return GenerationQuestion(
        profile=read_generation_profile(profile.pk, profile.document_sha256),
        profile_sha256=profile.document_sha256,
        workload=workload,
        goal=spec.goal,
        machine=MachineSpec.from_json(machine.document),
        calibration=machine.calibration,
    )


def _explained(baselines: dict[str, PricedPlan], machine: Machine) -> list[FoundPlan]:
    plain = baselines["keep_all"].prediction
    return [
        FoundPlan(
            priced=priced,
            machine=machine,
            explanation=explain_plan(
                priced.plan, prediction=priced.prediction, baseline=None if label == "keep_all" else plain
            ),
        )
        for label, priced in baselines.items()
    ]


def _marked(offer: Offer, *, is_chosen: bool) -> Offer:
    return replace(offer, is_chosen=is_chosen)


def _nothing_fits(errors: list[NoFeasiblePlan], offers: list[Offer]) -> NoFeasiblePlan:
    """Of the machines' answers the one that asks for least."""
    nearest = min(errors, key=lambda error: int(error.fields["smallest_feasible_bytes"]))
    nearest.fields["offers"] = [offer.to_json() for offer in offers]
    return nearest
