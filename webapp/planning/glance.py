"""A first answer while a search is at work: of plans written by hand, and the one taken before, the fastest that fits.

A few prices, so it is there at once. What fits here fits; a search may find a faster plan, or one where this finds none.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optimizer.base.errors import HeadroomError
from optimizer.plan.plan import Plan
from webapp.catalog.models import Machine
from webapp.catalog.queries import machines_visible_to
from webapp.jobs.specs.generation import GenerateSpec, generation_workload
from webapp.jobs.specs.training import JobSpec
from webapp.planning.generation_searches import GenerationQuestion, answer_at_hand, hand_written
from webapp.planning.pricing import generation_question_of, question_of
from webapp.planning.profiles import ready_profile
from webapp.planning.searches import TrainingQuestion, is_answered, problem_of

if TYPE_CHECKING:
    from optimizer.search.generation.problem import PricedGenerationPlan
    from optimizer.search.problem import PricedPlan, SearchProblem


@dataclass(frozen=True, kw_only=True)
class Glance:
    """One plan, without what its process takes besides tensors. None where none of those looked at fits."""

    priced: "PricedPlan | PricedGenerationPlan | None"
    machine: Machine


def glance_at(user: Any, spec: JobSpec, *, taken: Plan | None) -> Glance | None:
    """Over all machines the fastest. None where the search has its answer already, and where nothing can be priced yet."""
    profile = ready_profile(spec.model, adapter=spec.workload.adapter)
    machines = list(machines_visible_to(user).order_by("name"))
    if profile is None or not machines:
        return None
    questions = [(machine, question_of(spec, profile, machine)) for machine in machines]
    if all(is_answered(question) for _, question in questions):
        return None
    found = [Glance(priced=_fastest(question, taken), machine=machine) for machine, question in questions]
    fitting = [glance for glance in found if glance.priced is not None]
    return min(fitting, key=_total_s, default=found[0])


def glance_at_generation(user: Any, spec: GenerateSpec) -> Glance | None:
    """The same of a generate job, seen as its search sees it: every prompt the longest."""
    profile = ready_profile(spec.model, generates=True)
    machines = list(machines_visible_to(user).order_by("name"))
    if profile is None or not machines:
        return None
    workload = generation_workload(spec)
    questions: list[tuple[Machine, GenerationQuestion]] = [
        (machine, generation_question_of(spec, workload, profile, machine)) for machine in machines
    ]
    if all(answer_at_hand(question) is not None for _, question in questions):
        return None
    found = [Glance(priced=hand_written(question), machine=machine) for machine, question in questions]
    fitting = [glance for glance in found if glance.priced is not None]
    return min(fitting, key=_total_s, default=found[0])


def _total_s(glance: Glance) -> float:
    return float("inf") if glance.priced is None else glance.priced.prediction.total_s


def _fastest(question: TrainingQuestion, taken: Plan | None) -> "PricedPlan | None":
    from optimizer.search.answer.baselines import list_baselines

    problem = problem_of(question)
    plans = []
    for label, baseline in list_baselines(problem).items():
        setting, per_block = baseline(problem)
        plans.append((label, setting.plan(per_block)))
    if taken is not None and _suits(problem, taken):
        plans.append(("chosen before", taken))
    priced = [_priced(problem, label, plan) for label, plan in plans if problem.permits(plan)]
    fitting = [found for found in priced if found.verdict == "fits"]
    return min(fitting, key=lambda found: found.prediction.step_ms, default=None)


def _priced(problem: "SearchProblem", label: str, plan: Plan) -> "PricedPlan":
    return problem.priced(label, plan, problem.price(plan), in_detail=False)


def _suits(problem: "SearchProblem", plan: Plan) -> bool:
    try:
        problem.check(plan)
    except HeadroomError:
        return False
    return True
