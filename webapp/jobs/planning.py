"""Prices specs and turns an offer into a job. Torch-free: a stored profile and the machines' measured rates are enough.

An offer keeps the hash of what its fit rests on (profile, device, host memory, plan and program version). Rates and calibration
are left out: they move the time a little with each finished run, never whether the plan fits, and a job refused for that would
be refused for nothing.
"""

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal

from django.db import transaction

from optimizer.errors import HeadroomError, InvalidInput, InvalidWorkload, NoFeasiblePlan, PlanStale
from optimizer.hardware.machine import Machine as MachineSpec
from optimizer.plan.explain import explain_plan
from optimizer.plan.plan import PLAN_VERSION
from optimizer.profile.inference import INFERENCE_PROFILE_VERSION, InferenceProfile, inference_fingerprint
from optimizer.profile.profile import PROFILE_VERSION, profile_fingerprint
from optimizer.profile.profile import Profile as ModelProfile
from optimizer.search.problem import PricedPlan
from optimizer.serialize import to_json
from optimizer.workload import Adapter, Goal, InferenceWorkload, TrainingWorkload
from webapp.accounts.access import project_of_job
from webapp.catalog.models import Machine, Model, Profile
from webapp.catalog.queries import machines_visible_to
from webapp.jobs.actions import create_job
from webapp.jobs.errors import JobConflict, PlanDoesNotFit
from webapp.jobs.generation_searches import GenerationQuestion, explain_generation, find_generation
from webapp.jobs.generation_spec import GenerateSpec, inference_workload, read_job_spec
from webapp.jobs.models import Job, PlanOffer
from webapp.jobs.profiles import request_profile
from webapp.jobs.queries import offers_visible_to
from webapp.jobs.searches import Question, find_answer, problem_of
from webapp.jobs.spec import JobSpec

if TYPE_CHECKING:
    from optimizer.hardware.prices import Cost, PriceList
    from optimizer.search.elsewhere import Obtain
    from optimizer.search.inference.problem import PricedInferencePlan
    from optimizer.search.objectives import Answer

_PRICE_AGAIN = "Price the spec again and take one of its offers."


class NotPricedYet(JobConflict):
    """The model is still being profiled, or no machine is known yet."""

    code = "profile_pending"


class ProfileFailed(HeadroomError):
    """The model could not be traced; carries the trace's own error."""

    code = "bad_model"


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One priced plan as it is shown; the row keeps what a job needs of it."""

    row: PlanOffer
    is_chosen: bool
    is_lossless: bool
    explanation: list[str]
    costs: "tuple[Cost, ...]" = ()
    """Of the whole run on the machine's device; empty where no price of it is known."""

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.row.pk,
            "label": self.row.label,
            "chosen": self.is_chosen,
            "verdict": self.row.verdict,
            "machine": {"id": self.row.machine_id, "name": self.row.machine.name},
            "plan": self.row.plan,
            "prediction": self.row.prediction,
            "explanation": self.explanation,
            "lossless": self.is_lossless,
            "costs": [to_json(cost) for cost in self.costs],
        }


@dataclass(frozen=True, kw_only=True)
class PlanAnswer:
    """Offers for every known machine, or word that the model must be profiled first."""

    profile: Literal["ready", "pending"]
    offers: list[Offer] = field(default_factory=list)
    waiting_for: str = ""
    """While pending: ``profile`` or ``machine``."""

    def to_json(self) -> dict[str, Any]:
        if self.profile == "pending":
            return {"profile": "pending", "waiting_for": self.waiting_for}
        return {"offers": [offer.to_json() for offer in self.offers], "profile": "ready"}


def price_spec(user: Any, spec: dict[str, Any]) -> PlanAnswer:
    """Search on each machine and keep what was found as offers.

    Raises InvalidInput for the spec, ProfileFailed, and NoFeasiblePlan when nothing fits on any machine; its ``fields["offers"]``
    then holds the baselines, which are kept as offers too.
    """
    return price_job_spec(user, read_job_spec(user, spec))


def price_job_spec(user: Any, spec: JobSpec | GenerateSpec) -> PlanAnswer:
    from optimizer.hardware.prices import read_prices

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
        workload = inference_workload(spec)
        priced = [_search_generation(spec, workload, profile, machine) for machine in machines]
    prices = read_prices()
    with transaction.atomic():
        offers = [_keep(user, spec, profile, found, prices) for result in priced for found in result.found]
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
class Most:
    """The largest batch or the longest sequence, on the machine where it is largest."""

    machine: Machine
    answer: "Answer"


def find_most(user: Any, spec: JobSpec) -> Most | PlanAnswer:
    """For an objective that looks for the work; a pending answer where nothing can be priced yet. Nothing is kept.

    Raises NoFeasiblePlan where not even the smallest size fits on any machine.
    """
    profile = ready_profile(spec.model, adapter=spec.workload.adapter)
    machines = list(machines_visible_to(user).order_by("name"))
    if profile is None or not machines:
        return PlanAnswer(profile="pending", waiting_for="profile" if profile is None else "machine")
    found: list[Most] = []
    refused: list[NoFeasiblePlan] = []
    for machine in machines:
        question = question_of(spec, profile, machine)
        try:
            answer = find_answer(question, obtain=known_profiles_of(spec.model, question))
        except NoFeasiblePlan as error:
            refused.append(error)
        else:
            found.append(Most(machine=machine, answer=answer))
    if not found:
        raise _nothing_fits(refused, [])
    return max(found, key=lambda most: 0 if most.answer.limit is None else most.answer.limit.largest)


def profile_of(model: Model, *, adapter: Adapter | None) -> ModelProfile | None:
    """None while it is being made, which this asks for. Raises ProfileFailed."""
    row = ready_profile(model, adapter=adapter)
    return None if row is None else read_profile(row.pk, row.document_sha256)


def known_profile_of(model: Model, adapter: Adapter | None) -> ModelProfile | None:
    """The same without asking for it: None unless it is there."""
    row = _known_row(profile_fingerprint(model.fingerprint, adapter), PROFILE_VERSION)
    return None if row is None else read_profile(row.pk, row.document_sha256)


def known_inference_profile_of(model: Model) -> InferenceProfile | None:
    """The same of a model that generates."""
    row = _known_row(inference_fingerprint(model.fingerprint), INFERENCE_PROFILE_VERSION)
    return None if row is None else read_inference_profile(row.pk, row.document_sha256)


def _known_row(fingerprint: str, version: int) -> Profile | None:
    rows = Profile.objects.defer("document").filter(fingerprint=fingerprint, version=version)
    return rows.exclude(document_sha256="").first()


def inference_profile_of(model: Model) -> InferenceProfile | None:
    """Of a model that generates; None while it is being made, which this asks for. Raises ProfileFailed."""
    row = ready_profile(model, generates=True)
    return None if row is None else read_inference_profile(row.pk, row.document_sha256)


def ready_profile(model: Model, *, adapter: Adapter | None = None, generates: bool = False) -> Profile | None:
    """Its row, without the document; None while it is being made, which this asks for. Raises ProfileFailed."""
    profile = request_profile(model, adapter=adapter, generates=generates)
    if profile.error is not None and not profile.document_sha256:
        raise ProfileFailed(str(profile.error.get("message")), hint=str(profile.error.get("hint") or ""))
    return profile if profile.document_sha256 else None


def submit_job(
    user: Any,
    *,
    spec: dict[str, Any],
    plan_id: str | None = None,
    override: bool = False,
    actor: str,
    and_then: Callable[[Job], None] | None = None,
    max_duration_s: int | None = None,
) -> Job:
    """A job from an offer, or from a fresh search when none is named.

    and_then: called with the job in the transaction that makes it. max_duration_s: after so long it is asked to stop.

    Raises Forbidden for who may not run jobs in the project of the spec's model and dataset, PlanStale, PlanDoesNotFit (unless
    ``override``), NotPricedYet, and what ``price_spec`` raises.
    """
    read = read_job_spec(user, spec)
    project = project_of_job(user, (read.model, read.dataset))
    offer = _given_offer(user, read, plan_id) if plan_id else _fresh_offer(user, read, override=override)
    if offer.verdict == "does_not_fit" and not override:
        peak, budget = offer.prediction["device_peak_high_bytes"], read.goal.device_budget_bytes
        raise PlanDoesNotFit(
            f"plan {offer.label} needs up to {peak:,} bytes on the device; the budget is {budget:,}",
            hint="Take a plan that fits, raise the budget, or send override to run it all the same.",
            device_peak_high_bytes=peak,
            budget_bytes=budget,
        )
    with transaction.atomic():
        job = create_job(
            owner=user,
            project=project,
            spec={**read.to_json(), "plan": offer.label},
            model=read.model,
            dataset=read.dataset,
            plan=offer.plan,
            prediction=offer.prediction,
            machine=offer.machine,
            actor=actor,
            kind=read.kind,
            num_steps=read.num_steps if isinstance(read, GenerateSpec) else None,
            max_duration_s=max_duration_s,
        )
        if and_then is not None:
            and_then(job)
    return job


@dataclass(frozen=True, kw_only=True)
class _Found:
    priced: "PricedPlan | PricedInferencePlan"
    machine: Machine
    explanation: list[str]


@dataclass(frozen=True, kw_only=True)
class _Searched:
    found: list[_Found]
    infeasible: NoFeasiblePlan | None = None


def _search(spec: JobSpec, profile: Profile, machine: Machine) -> _Searched:
    # here, so that numpy and scipy are loaded with the first price and not with every process that knows of jobs
    from optimizer.search.baselines import price_baselines

    question = question_of(spec, profile, machine)
    try:
        result = find_answer(question, obtain=known_profiles_of(spec.model, question)).result
    except NoFeasiblePlan as error:
        return _Searched(found=_explained(price_baselines(problem_of(question)), machine), infeasible=error)
    chosen = _Found(priced=result.chosen, machine=machine, explanation=list(result.explanation))
    return _Searched(found=[chosen, *_explained(result.baselines, machine)])


def question_of(spec: JobSpec, profile: Profile, machine: Machine) -> Question:
    return Question(
        profile=read_profile(profile.pk, profile.document_sha256),
        profile_sha256=profile.document_sha256,
        workload=spec.workload,
        goal=spec.goal,
        machine=MachineSpec.from_json(machine.document),
        calibration=machine.calibration,
    )


def known_profiles_of(model: Model, question: Question) -> "Obtain":
    """For what would fit instead: the model's profile, and that with other adapters where it was made already."""

    def obtain(workload: TrainingWorkload, goal: Goal) -> ModelProfile | None:
        same = workload.adapter == question.workload.adapter
        return question.profile if same else known_profile_of(model, workload.adapter)

    return obtain


def _search_generation(
    spec: GenerateSpec, workload: InferenceWorkload, profile: Profile, machine: Machine
) -> _Searched:
    question = GenerationQuestion(
        profile=read_inference_profile(profile.pk, profile.document_sha256),
        profile_sha256=profile.document_sha256,
        workload=workload,
        goal=spec.goal,
        machine=MachineSpec.from_json(machine.document),
        calibration=machine.calibration,
    )
    answer = find_generation(question)
    found = [
        _Found(priced=priced, machine=machine, explanation=explain_generation(question, priced))
        for priced in answer.baselines.values()
    ]
    if answer.chosen is None:
        return _Searched(found=found, infeasible=answer.nothing_fits.error() if answer.nothing_fits else None)
    chosen = _Found(priced=answer.chosen, machine=machine, explanation=list(answer.explanation))
    return _Searched(found=[chosen, *found])


@functools.lru_cache(maxsize=16)
def read_profile(fingerprint: str, document_sha256: str) -> ModelProfile:
    """Kept by its hash: each edit of the form prices again, and reading a profile takes longer than pricing with it."""
    return ModelProfile.from_json(Profile.objects.get(fingerprint=fingerprint).document)


@functools.lru_cache(maxsize=16)
def read_inference_profile(fingerprint: str, document_sha256: str) -> InferenceProfile:
    """Kept like those of training."""
    return InferenceProfile.from_json(Profile.objects.get(fingerprint=fingerprint).document)


def _explained(baselines: dict[str, PricedPlan], machine: Machine) -> list[_Found]:
    plain = baselines["keep_all"].prediction
    return [
        _Found(
            priced=priced,
            machine=machine,
            explanation=explain_plan(
                priced.plan, prediction=priced.prediction, baseline=None if label == "keep_all" else plain
            ),
        )
        for label, priced in baselines.items()
    ]


def _keep(
    user: Any, spec: JobSpec | GenerateSpec, profile: Profile, found: _Found, prices: "PriceList"
) -> Offer:
    from optimizer.hardware.prices import price_run

    row = PlanOffer.objects.create(
        owner=user,
        spec=spec.to_json(),
        machine=found.machine,
        label=found.priced.label,
        plan=found.priced.plan.to_json(),
        prediction=found.priced.prediction.to_json(),
        verdict=found.priced.verdict,
        basis=basis_of(profile, found.machine),
    )
    device, total_s = str(found.machine.document["device"]["name"]), found.priced.prediction.total_s
    num_tokens = spec.workload.num_steps * spec.workload.tokens_per_step if isinstance(spec, JobSpec) else None
    return Offer(
        row=row,
        is_chosen=False,
        is_lossless=found.priced.plan.is_lossless,
        explanation=found.explanation,
        costs=price_run(prices, device=device, total_s=total_s, num_tokens=num_tokens),
    )


def _marked(offer: Offer, *, is_chosen: bool) -> Offer:
    return replace(offer, is_chosen=is_chosen)


def _nothing_fits(errors: list[NoFeasiblePlan], offers: list[Offer]) -> NoFeasiblePlan:
    """Of the machines' answers the one that asks for least."""
    nearest = min(errors, key=lambda error: int(error.fields["smallest_feasible_bytes"]))
    nearest.fields["offers"] = [offer.to_json() for offer in offers]
    return nearest


def _given_offer(user: Any, spec: JobSpec | GenerateSpec, plan_id: str) -> PlanOffer:
    # isprintable: a form's text may hold a NUL, on which PostgreSQL fails
    offer = offers_visible_to(user).select_related("machine").filter(pk=plan_id).first() if plan_id.isprintable() else None
    if offer is None:
        raise InvalidInput(
            f"plan_id {plan_id[:80]!r} is not one of your offers",
            field="plan_id",
            value=plan_id[:80],
            allowed="an id from POST /plans",
        )
    asked = spec.priced_part()
    if {key: offer.spec.get(key) for key in asked} != asked:
        raise PlanStale(f"plan {offer.label} was priced for another spec", hint=_PRICE_AGAIN)
    profile = Profile.objects.defer("document").filter(fingerprint=spec.profile_fingerprint).first()
    if profile is None or not profile.document_sha256 or offer.basis != basis_of(profile, offer.machine):
        raise PlanStale(
            f"plan {offer.label} no longer holds on {offer.machine.name}: "
            "the model's profile, the machine or the program has changed",
            hint=_PRICE_AGAIN,
        )
    return offer


def _fresh_offer(user: Any, spec: JobSpec | GenerateSpec, *, override: bool) -> PlanOffer:
    try:
        answer = price_job_spec(user, spec)
    except NoFeasiblePlan as error:
        # a baseline was asked for by name, knowing that it may not fit
        if not override or spec.plan_label == "chosen":
            raise
        ids = [row["id"] for row in error.fields["offers"] if row["label"] == spec.plan_label]
        return _fastest(list(offers_visible_to(user).select_related("machine").filter(pk__in=ids)))
    if answer.profile == "pending":
        waiting = "the model is being profiled" if answer.waiting_for == "profile" else "no machine has registered yet"
        raise NotPricedYet(f"the spec cannot be priced yet: {waiting}", hint="Try again in a few seconds.")
    if spec.plan_label == "chosen":
        return next(offer.row for offer in answer.offers if offer.is_chosen)
    return _fastest([offer.row for offer in answer.offers if offer.row.label == spec.plan_label])


def _fastest(rows: list[PlanOffer]) -> PlanOffer:
    order = {"fits": 0, "tight": 1, "unknown": 2, "does_not_fit": 3}
    return min(rows, key=lambda row: (order[row.verdict], row.prediction["total_s"]))


def basis_of(profile: Profile, machine: Machine) -> str:
    """Hash of what decides whether a plan fits."""
    facts = [
        profile.document_sha256,
        machine.pk,
        machine.document["device"],
        machine.document["host_memory_bytes"],
        PLAN_VERSION,
        program_version(),
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def program_version() -> str:
    try:
        return version("headroom")
    except PackageNotFoundError:  # run from the source tree
        return "0.1.0"
