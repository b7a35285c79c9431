"""Finds plans for jobs that await one, so that they start by themselves.

One that was submitted before its model was profiled is priced, once the profile is there, as its owner would price it now. One
that ran out of memory or disk gets another plan. A job for which none fits, or whose spec can no longer be read, ends with the
reason.
"""

import logging
from itertools import islice

from django.db import InterfaceError, OperationalError
from django.db.models import QuerySet

from optimizer.base.errors import HeadroomError, NoFeasiblePlan
from webapp.jobs.actions import plan_job, refuse_plan
from webapp.jobs.models import Job, Kind, Reason, State
from webapp.jobs.specs.generation import read_job_spec
from webapp.jobs.turns import QUEUE_ORDER
from webapp.planning.offers import offer_for, waits_for_compiled
from webapp.planning.pricing import price_job_spec
from webapp.planning.replanning import find_next_plan, write_story
from webapp.planning.replanning_generation import find_next_generation_plan

logger = logging.getLogger(__name__)

JOBS_PER_ROUND = 3
"""A search may take seconds, and what comes meanwhile may stand before the rest."""


def plan_waiting_jobs() -> list[str]:
    """Plan the first jobs that await a plan and whose profile is ready; ids of those that were planned or ended.

    Those that are not ready, or cannot be planned for a fault of the program, keep none behind them from it.
    """
    ids = list(_waiting().order_by(*QUEUE_ORDER).values_list("pk", flat=True))
    return list(islice((job_id for job_id in ids if _try_to_plan(job_id)), JOBS_PER_ROUND))


def _waiting() -> QuerySet[Job]:
    return Job.objects.filter(state=State.QUEUED, awaits_plan=True)


def _try_to_plan(job_id: str) -> bool:
    try:
        job = _waiting().select_related("owner", "model", "machine").filter(pk=job_id).first()
        return job is not None and _plan(job)
    except (InterfaceError, OperationalError):
        raise  # of the database, not of the job: it is asked no further in this round
    except Exception:
        logger.exception("no plan can be looked for: %s", job_id)
        return False


def _plan(job: Job) -> bool:
    if job.attempt and job.plan is not None:
        return _replan(job)
    try:
        read = read_job_spec(job.owner, job.spec)
        answer = price_job_spec(job.owner, read)
        if answer.profile == "pending" or waits_for_compiled(answer, read):
            return False
        offer = offer_for(answer, read.plan_label)
    except NoFeasiblePlan as error:
        return refuse_plan(job, reason=Reason.DOES_NOT_FIT, error=error)
    except HeadroomError as error:
        return refuse_plan(job, reason=Reason.NOT_PLANNED, error=error)
    spec = {**read.to_json(), "plan": offer.label}
    return plan_job(job, spec=spec, plan=offer.plan, prediction=offer.prediction, machine=offer.machine)


def _replan(job: Job) -> bool:
    """The reason of the last attempt's end stays the job's where it ends here."""
    try:
        found = find_next_generation_plan(job) if job.kind == Kind.GENERATE else find_next_plan(job)
    except HeadroomError as error:
        if job.reason == Reason.DISK_FULL:
            return _keep_plan(job)
        if isinstance(error, NoFeasiblePlan):
            return refuse_plan(job, reason=Reason(job.reason), error=error, message=write_story(job, error))
        return refuse_plan(job, reason=Reason.NOT_PLANNED, error=error)
    if found is None:
        return False
    return plan_job(
        job,
        spec=job.spec,
        plan=found.plan,
        prediction=found.prediction,
        machine=found.machine,
        change=found.change,
    )


def _keep_plan(job: Job) -> bool:
    """The disk may have room again: the attempt after the pause decides."""
    if job.plan is None or job.prediction is None or job.machine is None:
        return False
    why = "no plan that keeps less on the disk fits; the job goes on under this one once there is room"
    return plan_job(job, spec=job.spec, plan=job.plan, prediction=job.prediction, machine=job.machine, change=why)
