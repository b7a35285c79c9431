"""Offers: priced plans that are kept so that a job can be made of one, and whether one still holds.

An offer keeps the hash of what its fit rests on (profile, device, host memory, plan and program version). Rates and calibration
are left out: they move the time a little with each finished run, never whether the plan fits, and a job refused for that would
be refused for nothing.
"""

import hashlib
import json
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from django.contrib.auth.models import User

from optimizer.base.errors import InvalidInput, PlanStale
from optimizer.base.serialize import to_json
from optimizer.hardware.rental import Cost, PriceList, price_run
from optimizer.plan.plan import PLAN_VERSION, Plan
from webapp.catalog.models import Machine, Profile
from webapp.jobs.models import PlanOffer
from webapp.jobs.queries import offers_visible_to
from webapp.jobs.specs.generation import GenerateSpec
from webapp.jobs.specs.training import JobSpec
from webapp.planning.search.question import FoundPlan
from webapp.prepared import Prepared, number_mark, text_mark

_OFFER: "Prepared[PlanOffer]" = Prepared(
    lambda: offers_visible_to(User(pk=number_mark("user_id"))).filter(pk=text_mark("plan_id")), "user_id", "plan_id"
)
_MACHINE: "Prepared[Machine]" = Prepared(
    lambda: Machine.objects.defer("calibration").filter(pk=text_mark("machine_id")), "machine_id"
)
_PROFILE: "Prepared[Profile]" = Prepared(
    lambda: Profile.objects.filter(fingerprint=text_mark("fingerprint")).values_list("document_sha256"), "fingerprint"
)
_PRICE_AGAIN = "Price the spec again and take one of its offers."


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One priced plan as it is shown; the row keeps what a job needs of it."""

    row: PlanOffer
    is_chosen: bool
    is_lossless: bool
    explanation: list[str]
    costs: tuple[Cost, ...] = ()
    """Costs of the whole run on the machine's device; empty where no price of it is known."""

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.row.pk,
            "label": self.row.label,
            "chosen": self.is_chosen,
            "verdict": self.row.verdict,
            "machine": {
                "id": self.row.machine_id,
                "name": self.row.machine.name,
                "device": " and ".join(_kinds_of(self.row)),
            },
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
    awaits_compiled: bool = False
    """Compiled blocks, which are being traced, may make a better offer."""
    remarks: tuple[str, ...] = ()
    """Sentences on what was taken of the network between machines that share the job."""

    def to_json(self) -> dict[str, Any]:
        if self.profile == "pending":
            return {"profile": "pending", "waiting_for": self.waiting_for}
        awaited = {"compiled_blocks": "pending"} if self.awaits_compiled else {}
        remarks = {"remarks": list(self.remarks)} if self.remarks else {}
        return {"offers": [offer.to_json() for offer in self.offers], "profile": "ready", **awaited, **remarks}


def offer_for(answer: PlanAnswer, label: str) -> PlanOffer:
    """The offer that a spec's ``plan`` names: the chosen one, or of a baseline the fastest machine's."""
    if label == "chosen":
        return next(offer.row for offer in answer.offers if offer.is_chosen)
    return fastest_of([offer.row for offer in answer.offers if offer.row.label == label])


def waits_for_compiled(answer: PlanAnswer, spec: JobSpec | GenerateSpec) -> bool:
    """Report whether a job that can wait does so for a trace: where it wants the best plan, and not one by its name."""
    return answer.awaits_compiled and spec.plan_label == "chosen"


def fastest_of(rows: list[PlanOffer]) -> PlanOffer:
    """Picks the row that ends first among those with the best verdict."""
    order = {"fits": 0, "tight": 1, "unknown": 2, "does_not_fit": 3}
    return min(rows, key=lambda row: (order[row.verdict], row.prediction["total_s"]))


def keep_offer(
    user: Any,
    spec: JobSpec | GenerateSpec,
    found: FoundPlan,
    *,
    machine: Machine,
    prices: PriceList,
) -> Offer:
    """A plan found on the machine, as a row that a job can be made of."""
    row = PlanOffer.objects.create(
        owner=user,
        spec=spec.to_json(),
        machine=machine,
        label=found.priced.label,
        plan=found.priced.plan.to_json(),
        prediction=found.priced.prediction.to_json(),
        verdict=found.priced.verdict,
        basis=basis_of(found.profile_sha256, machine, spec=spec),
    )
    kinds, prediction = _kinds_of(row), found.priced.prediction
    num_tokens = spec.workload.num_steps * spec.workload.tokens_per_step if isinstance(spec, JobSpec) else None
    return Offer(
        row=row,
        is_chosen=False,
        is_lossless=found.priced.plan.is_lossless,
        explanation=found.explanation,
        # one rent is of devices that are all alike
        costs=() if len(kinds) > 1 else price_run(
            prices,
            device=kinds[0],
            total_s=prediction.total_s,
            interval_s=prediction.total_interval_s,
            num_tokens=num_tokens,
        ),
    )


def _kinds_of(row: PlanOffer) -> list[str]:
    """Names of the devices that the plan runs on, each once."""
    named = [str(rank["device"]) for rank in row.prediction.get("ranks") or ()]
    return list(dict.fromkeys(named)) or [str(row.machine.document["device"]["name"])]


def given_offer(user: Any, spec: JobSpec | GenerateSpec, plan_id: str) -> PlanOffer:
    # isprintable: a form's text may hold a NUL, on which PostgreSQL fails
    offer = _OFFER.first(user_id=user.pk, plan_id=plan_id) if plan_id.isprintable() else None
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
    ((profile_sha256,),) = _PROFILE.values(fingerprint=_fingerprint_behind(offer, spec)) or [("",)]
    machine = _MACHINE.first(machine_id=offer.machine_id)
    if machine is None:  # it has gone, and its offers with it
        raise PlanStale(f"plan {offer.label} was priced for a machine that is gone", hint=_PRICE_AGAIN)
    offer.machine = machine
    if not profile_sha256 or offer.basis != basis_of(profile_sha256, machine, spec=spec):
        raise PlanStale(
            f"plan {offer.label} no longer holds on {offer.machine.name}: "
            "the model's profile, the machine or the program has changed",
            hint=_PRICE_AGAIN,
        )
    return offer


def _fingerprint_behind(offer: PlanOffer, spec: JobSpec | GenerateSpec) -> str:
    """Fingerprint of the profile that priced the offer: another where its blocks are compiled."""
    if isinstance(spec, JobSpec) and (offer.plan.get("kernels") or {}).get("blocks") == "compiled":
        return spec.fingerprint_behind(Plan.from_json(offer.plan))
    return spec.profile_fingerprint


def basis_of(profile_sha256: str, machine: Machine, *, spec: JobSpec | GenerateSpec) -> str:
    """Hash of what decides whether a plan fits: on the machine, or on all that share the job."""
    joining = spec.joining if isinstance(spec, JobSpec) else None
    rows = [machine] if joining is None else joining.rows
    facts = [profile_sha256, PLAN_VERSION, program_version(), *(_basis_of_machine(row) for row in rows)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _basis_of_machine(machine: Machine) -> list[Any]:
    document = machine.document
    kinds = [document["device"], *(kind["device"] for kind in document.get("others") or ())]
    return [machine.pk, document["host_memory_bytes"], *kinds]


@cache
def program_version() -> str:
    try:
        return version("headroom")
    except PackageNotFoundError:  # run from the source tree
        return "0.1.0"
