"""Makes a job from an offer, or from a fresh search where none is named."""

from collections.abc import Callable
from typing import Any

from django.db import transaction

from optimizer.base.errors import NoFeasiblePlan
from optimizer.base.units import format_bytes
from webapp.accounts.access import project_of_job
from webapp.accounts.turns import hurry
from webapp.catalog.files.room import require_floor
from webapp.jobs.actions import create_job
from webapp.jobs.checkpoints import ready_branch
from webapp.jobs.errors import JobConflict, PlanDoesNotFit
from webapp.jobs.models import Job, PlanOffer
from webapp.jobs.queries import offers_visible_to
from webapp.jobs.specs.generation import GenerateSpec, read_job_spec
from webapp.jobs.specs.training import JobSpec
from webapp.jobs.turns import require_queue_room
from webapp.planning.offers import fastest_of, given_offer, offer_for, waits_for_compiled
from webapp.planning.pricing import price_job_spec


class NotPricedYet(JobConflict):
    """The model is still being profiled, or no machine is known yet."""

    code = "profile_pending"


def submit_job(
    user: Any,
    *,
    spec: dict[str, Any],
    plan_id: str | None = None,
    override: bool = False,
    when_ready: bool = False,
    actor: str,
    and_then: Callable[[Job], None] | None = None,
    max_duration_s: int | None = None,
) -> Job:
    """A job from an offer, or from a fresh search when none is named.

    when_ready: a job that cannot be priced yet, or whose compiled blocks cannot, is taken all the same, and starts once it was.
    and_then: called with the job in the transaction that makes it. max_duration_s: after so long it is asked to stop.

    Raises Forbidden for who may not run jobs in the project of the spec's model and dataset, PlanStale, PlanDoesNotFit (unless
    ``override``), NotPricedYet, DiskFull, NoCheckpoint, LimitReached where too many jobs wait, and what ``price_spec`` raises.
    """
    require_floor()
    read = read_job_spec(user, spec)
    project = project_of_job(user, (read.model, read.dataset))
    require_queue_room(user, project)
    try:
        offer = given_offer(user, read, plan_id) if plan_id else _fresh_offer(user, read, override=override, may_wait=when_ready)
    except NotPricedYet:
        if not when_ready:
            raise
        offer = None
    if offer is not None and offer.verdict == "does_not_fit" and not override:
        peak, budget = offer.prediction["device_peak_high_bytes"], read.goal.device_budget_bytes
        raise PlanDoesNotFit(
            f"plan {offer.label} needs up to {format_bytes(peak)} on the device; the budget is {format_bytes(budget)}",
            hint="Take a plan that fits, raise the budget, or send override to run it all the same.",
            device_peak_high_bytes=peak,
            budget_bytes=budget,
        )
    branched_from = read.resume_from if isinstance(read, JobSpec) else None
    with ready_branch(branched_from) as job_id, transaction.atomic():
        job = create_job(
            job_id=job_id,
            owner=user,
            project=project,
            spec={**read.to_json(), "plan": offer.label if offer else read.plan_label},
            model=read.model,
            dataset=read.dataset,
            plan=offer.plan if offer else None,
            prediction=offer.prediction if offer else None,
            machine=offer.machine if offer else None,
            awaits_plan=offer is None,
            actor=actor,
            kind=read.kind,
            num_steps=read.num_steps if isinstance(read, GenerateSpec) else None,
            max_duration_s=max_duration_s,
        )
        if and_then is not None:
            and_then(job)
    return job


def _fresh_offer(user: Any, spec: JobSpec | GenerateSpec, *, override: bool, may_wait: bool) -> PlanOffer:
    """may_wait: for compiled blocks that are being traced, rather than take the plan without."""
    hurry()
    try:
        answer = price_job_spec(user, spec)
    except NoFeasiblePlan as error:
        # a baseline was asked for by name, knowing that it may not fit
        if not override or spec.plan_label == "chosen":
            raise
        ids = [row["id"] for row in error.fields["offers"] if row["label"] == spec.plan_label]
        return fastest_of(list(offers_visible_to(user).select_related("machine").filter(pk__in=ids)))
    if answer.profile == "pending":
        waiting = "the model is being profiled" if answer.waiting_for == "profile" else "no machine has registered yet"
        raise NotPricedYet(f"the spec cannot be priced yet: {waiting}", hint="Try again in a few seconds.")
    if may_wait and waits_for_compiled(answer, spec):
        raise NotPricedYet("compiled blocks are being traced, and may make a better plan", hint="Try again in a few seconds.")
    return offer_for(answer, spec.plan_label)
