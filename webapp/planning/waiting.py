"""Finds plans for jobs that await one, so that they start by themselves.

One that was submitted before its model was profiled is priced, once the profile is there, as its owner would price it now. One
that ran out of memory gets another plan. A job for which none fits, or whose spec can no longer be read, ends with the reason.
"""

from optimizer.base.errors import HeadroomError, NoFeasiblePlan
from webapp.jobs.actions import plan_job, refuse_plan
from webapp.jobs.claiming import QUEUE_ORDER
from webapp.jobs.models import Job, Kind, Reason, State
from webapp.jobs.specs.generation import read_job_spec
from webapp.planning.offers import offer_for, waits_for_compiled
from webapp.planning.pricing import price_job_spec
from webapp.planning.replanning import find_next_plan, write_story
from webapp.planning.replanning_generation import find_next_generation_plan

JOBS_PER_ROUND = 3
"""A search may take seconds, and leases are looked at in the same round."""


def plan_waiting_jobs() -> list[str]:
    """Plan the oldest jobs that await a plan and whose profile is ready; ids of those that were planned or ended."""
    waiting = Job.objects.filter(state=State.QUEUED, awaits_plan=True).select_related("owner", "model", "machine")
    return [job.pk for job in waiting.order_by(*QUEUE_ORDER)[:JOBS_PER_ROUND] if _plan(job)]


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
    except NoFeasiblePlan as error:
        return refuse_plan(job, reason=Reason(job.reason), error=error, message=write_story(job, error))
    except HeadroomError as error:
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
