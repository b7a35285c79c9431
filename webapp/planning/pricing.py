"""Prices specs: a search on each known machine, and what was found kept as offers.

Torch-free: a stored profile and the machines' measured rates are enough.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from django.db import transaction

from optimizer.base.errors import InvalidInput, InvalidPlan, InvalidWorkload, NoFeasiblePlan
from optimizer.goal import Goal
from optimizer.hardware.rental import read_prices
from optimizer.search.questions.answers import ObjectiveAnswer
from webapp.catalog.models import Machine
from webapp.catalog.queries import machines_visible_to
from webapp.jobs.devices.room import count_devices
from webapp.jobs.specs.generation import GenerateSpec, read_job_spec
from webapp.jobs.specs.training import JobSpec
from webapp.planning.offers import Offer, PlanAnswer, keep_offer
from webapp.planning.search.generation import asked_by_generation
from webapp.planning.search.question import FoundPlans, Place, Question
from webapp.planning.search.resolve import Asked, Waiting, joined_place, place_of, resolve
from webapp.planning.search.training import asked_by_training, find_answer


def price_spec(user: Any, spec: dict[str, Any]) -> PlanAnswer:
    """Search on each machine and keep what was found as offers.

    Raises InvalidInput for the spec, ProfileFailed, and NoFeasiblePlan when nothing fits on any machine; its ``fields["offers"]``
    then holds the baselines, which are kept as offers too.
    """
    return price_job_spec(user, read_job_spec(user, spec))


def price_job_spec(user: Any, spec: JobSpec | GenerateSpec) -> PlanAnswer:
    """``price_spec`` of one that was read."""
    if isinstance(spec, JobSpec):
        _check_objective(spec.goal)
    places = _places_for(user, spec)
    asked: Asked[Question[Any, Any, Any]] = asked_by_training(spec) if isinstance(spec, JobSpec) else asked_by_generation(spec)
    questions = resolve(asked, [place for _, place in places])
    if isinstance(questions, Waiting):
        return PlanAnswer(profile="pending", waiting_for=questions.waiting_for)
    found = _find_on_each([machine for machine, _ in places], questions)
    prices = read_prices()
    with transaction.atomic():
        offers = [
            keep_offer(user, spec, plan, machine=machine, prices=prices)
            for machine, plans in found
            for plan in plans.all
        ]
    fitting = [offer for offer in offers if offer.row.label == "chosen"]
    chosen = min(fitting, key=_order_of(spec), default=None)
    if chosen is None:
        raise _nothing_fits([plans.nothing_fits for _, plans in found if plans.nothing_fits], offers)
    return PlanAnswer(
        profile="ready",
        offers=[replace(offer, is_chosen=offer is chosen) for offer in offers],
        awaits_compiled=any(plans.awaits_compiled for _, plans in found),
        remarks=spec.joining.remarks if isinstance(spec, JobSpec) and spec.joining is not None else (),
    )


def _find_on_each(
    machines: Sequence[Machine], questions: Sequence[Question[Any, Any, Any]]
) -> list[tuple[Machine, FoundPlans]]:
    """Plans on each machine. One with devices of several kinds may be unable to keep a pin that others keep: it is left out.

    Raises InvalidPlan where no machine is left.
    """
    found, refused = [], None
    for machine, question in zip(machines, questions, strict=True):
        try:
            found.append((machine, question.find_plans()))
        except InvalidPlan as error:
            refused = error
    if refused is not None and not found:
        raise refused
    return found


def _places_for(user: Any, spec: JobSpec | GenerateSpec) -> list[tuple[Machine, Place]]:
    """Those with as many devices as the goal's pins demand; where the spec names machines that share the job, they alone, as one,
    under the first that it names.
    """
    fewest = 1
    if isinstance(spec, JobSpec):
        if spec.joining is not None:
            return [(spec.joining.rows[0], joined_place(spec.joining))]
        pins = spec.goal.pins.layout
        is_shared = pins.data not in (None, "replicated") or (pins.sync_every or 1) > 1
        num_stages = 2 if pins.schedule == "breadth_first" else len(pins.stage_blocks or ())
        fewest = max(pins.num_devices or 0, pins.tensor or 0) or num_stages or (2 if is_shared else 1)
    machines = machines_visible_to(user).order_by("name")
    return [(machine, place_of(machine)) for machine in machines if count_devices(machine) >= fewest]


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
    answer: ObjectiveAnswer


def find_largest_fit(user: Any, spec: JobSpec) -> LargestFit | PlanAnswer:
    """For an objective that looks for the work; a pending answer where nothing can be priced yet. Nothing is kept.

    Raises NoFeasiblePlan where not even the smallest size fits on any machine.
    """
    places = _places_for(user, spec)
    questions = resolve(asked_by_training(spec), [place for _, place in places])
    if isinstance(questions, Waiting):
        return PlanAnswer(profile="pending", waiting_for=questions.waiting_for)
    found: list[LargestFit] = []
    too_small: list[NoFeasiblePlan] = []
    refused: InvalidInput | None = None
    for (machine, _), question in zip(places, questions, strict=True):
        try:
            found.append(LargestFit(machine=machine, answer=find_answer(question)))
        except NoFeasiblePlan as error:
            too_small.append(error)
        except InvalidInput as error:  # such as devices of several kinds, for which no size is looked for
            refused = error
    if not found:
        raise _nothing_fits(too_small, []) if refused is None or too_small else refused
    return max(found, key=lambda most: 0 if most.answer.limit is None else most.answer.limit.largest)


def _nothing_fits(errors: list[NoFeasiblePlan], offers: list[Offer]) -> NoFeasiblePlan:
    """The machines' answer that asks for least."""
    nearest = min(errors, key=lambda error: int(error.fields["smallest_feasible_bytes"]))
    nearest.fields["offers"] = [offer.to_json() for offer in offers]
    return nearest
