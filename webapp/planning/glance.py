"""A first answer while a search is at work: of plans written by hand, and the one taken before, the fastest that fits.

A few prices, so it is there at once. What fits here fits; a search may find a faster plan, or one where this finds none.
"""

from dataclasses import dataclass
from typing import Any

from optimizer.plan.plan import Plan
from webapp.catalog.models import Machine
from webapp.catalog.queries import machines_visible_to
from webapp.jobs.specs.generation import GenerateSpec
from webapp.jobs.specs.training import JobSpec
from webapp.planning.search.generation import asked_by_generation
from webapp.planning.search.question import AnyPriced, Question
from webapp.planning.search.resolve import Asked, Waiting, place_of, resolve
from webapp.planning.search.training import asked_by_training


@dataclass(frozen=True, kw_only=True)
class Glance:
    """One plan, without what its process takes besides tensors. None where none of those looked at fits."""

    priced: AnyPriced | None
    machine: Machine


def glance_at(user: Any, spec: JobSpec | GenerateSpec, *, taken: Plan | None) -> Glance | None:
    """Over all machines the fastest. None where the search has its answer already, and where nothing can be priced yet.

    A generate job is seen as its search sees it: every prompt the longest.
    """
    if isinstance(spec, JobSpec) and spec.joining is not None:
        return None  # no plan for several machines is written by hand
    machines = list(machines_visible_to(user).order_by("name"))
    asked: Asked[Question[Any, Any, Any]] = asked_by_training(spec) if isinstance(spec, JobSpec) else asked_by_generation(spec)
    questions = resolve(asked, [place_of(machine) for machine in machines])
    if isinstance(questions, Waiting) or all(question.is_answered for question in questions):
        return None
    found = [
        Glance(priced=question.find_by_hand(taken=taken), machine=machine)
        for machine, question in zip(machines, questions, strict=True)
    ]
    fitting = [glance for glance in found if glance.priced is not None]
    return min(fitting, key=_total_s, default=found[0])


def _total_s(glance: Glance) -> float:
    return float("inf") if glance.priced is None else glance.priced.prediction.total_s
