"""Judges a job whose worker was lost together with its process: killed, halted, unplugged, or started again with its machine.

That is seldom the job's doing, so it never counts among its failed attempts, and a machine that starts again and again must not
fail what waits. Yet a job may end its worker, by taking the host's memory for one. It shows in how other jobs fared on the same
machine meanwhile. Losses are counted in a row, as long as no new checkpoint was reached:

- others worked there for as long and ended by themselves, and no other was lost: the job does it, and fails after 3;
- others were lost as well, and none fared better: the machine does it, and the job goes on;
- nothing of the other jobs says which, or they say both: the job is held after 10, as if paused, until somebody resumes it; a
  profile job, which nobody sees, fails instead, and is asked for again.

Jobs that were lost with the very same worker process say nothing, because each may have taken the other along. Of a job over
several machines the machine counts that was lost.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from webapp.jobs.models import Attempt, Event, Kind, Member, Reason

MAX_LOSSES_BLAMED = 3
MAX_LOSSES = 10

Verdict = Literal["go on", "hold", "fail"]


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The record of a job that has just lost its worker, and of the others on the same machines."""

    num_in_a_row: int
    """This one included."""
    num_others_fine: int = 0
    """Other jobs' attempts on these machines meanwhile that lived as long and ended by themselves."""
    num_others_lost: int = 0

    @property
    def verdict(self) -> Verdict:
        if self.num_others_fine and not self.num_others_lost:
            return "fail" if self.num_in_a_row >= MAX_LOSSES_BLAMED else "go on"
        if self.num_others_lost and not self.num_others_fine:
            return "go on"
        return "hold" if self.num_in_a_row >= MAX_LOSSES else "go on"


def is_loss(attempt: Attempt) -> bool:
    """Report whether its worker was lost; one whose process alone was killed has an exit code."""
    return attempt.outcome == Reason.WORKER_LOST and attempt.exit_code is None


def count_losses(attempt: Attempt, *, now: datetime, lost: Member | None = None) -> Losses:
    """Count as if the present attempt had been lost just now. lost: the part of it that was, where it was not the whole."""
    row = _losses_in_a_row(attempt)
    shortest = min((each.ended_at or now) - each.started_at for each in row)
    parts = {part.attempt_id: part for part in Member.objects.filter(attempt__in=row, is_lost=True)}
    parts |= {attempt.pk: lost} if lost is not None else {}
    where: list[Attempt | Member] = [parts.get(each.pk, each) for each in row]
    others = Attempt.objects.filter(
        machine__in={each.machine_id for each in where if each.machine_id},
        started_at__gte=row[-1].started_at,
        ended_at__isnull=False,
    ).exclude(job_id=attempt.job_id)
    workers = {each.worker for each in where}
    num_fine = num_lost = 0
    for other in others.only("worker", "outcome", "exit_code", "started_at", "ended_at"):
        if is_loss(other):
            num_lost += other.worker not in workers
        elif other.ended_at is not None:
            num_fine += other.ended_at - other.started_at >= shortest
    return Losses(num_in_a_row=len(row), num_others_fine=num_fine, num_others_lost=num_lost)


def _losses_in_a_row(attempt: Attempt) -> list[Attempt]:
    """The newest first. A new checkpoint begins a new row, and so does somebody who resumes the job."""
    attempt.refresh_from_db(fields=["pid", "resumed_from_step", "made_progress"])
    resumed_at = Event.objects.filter(job_id=attempt.job_id, kind="resumed").order_by("-seq").values_list("at", flat=True).first()
    row, began_at_step = [attempt], _began_at_step(attempt)
    before = Attempt.objects.filter(job_id=attempt.job_id, number__lt=attempt.number).select_related("job")
    for earlier in before.order_by("-number"):
        step = _began_at_step(earlier)
        is_another_step = None not in (step, began_at_step) and step != began_at_step
        has_served = earlier.job.kind == Kind.SERVE and earlier.made_progress
        is_before = resumed_at is not None and earlier.started_at < resumed_at
        if not is_loss(earlier) or is_another_step or has_served or is_before:
            break
        row.append(earlier)
        began_at_step = step if began_at_step is None else began_at_step
    return row


def _began_at_step(attempt: Attempt) -> int | None:
    """None for one that was lost before it had said so."""
    return None if attempt.pid is None else attempt.resumed_from_step
