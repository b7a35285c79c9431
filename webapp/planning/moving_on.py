"""Moves jobs over several machines on without one that stays away, such as a computer that was sold or is switched off.

A job that has begun waits ``HEADROOM_AWAY_S`` for a machine that it lost. Then a plan is looked for on those of its machines that
are there, in the form of weights that its checkpoint has, and it goes on from that checkpoint; the machine is taken off its spec.
Where nothing fits, or a pin demands the machine, it waits on. Devices that synchronize every few steps alone do not move on: with
fewer of them it would be another training.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from django.conf import settings
from django.db.models import Q
from django.utils import timezone

from optimizer.api.keep_form import keep_form
from optimizer.base.errors import HeadroomError
from optimizer.base.serialize import from_json
from optimizer.base.units import format_duration
from optimizer.goal import Goal
from optimizer.plan.explain.diff import describe_change
from optimizer.plan.plan import Plan
from optimizer.workload import TrainingWorkload
from webapp.catalog.models import Machine
from webapp.jobs.actions import plan_job
from webapp.jobs.devices.joined import THERE_WITHIN_S, ranks_by_machine
from webapp.jobs.devices.named import JOINED
from webapp.jobs.models import Job
from webapp.jobs.moves import claimable
from webapp.jobs.specs.joining import JOINING_FIELDS, MACHINES, joining_of
from webapp.jobs.turns import QUEUE_ORDER
from webapp.planning.replanning import has_checkpoint
from webapp.planning.search.resolve import Waiting, joined_place, place_of, resolve
from webapp.planning.search.training import AskedTraining, find_answer

logger = logging.getLogger(__name__)


class MovingOn:
    """Remembers for which machines a job was searched in vain, so that it is not searched again while the same are there."""

    def __init__(self) -> None:
        self._in_vain: dict[str, tuple[int, tuple[str, ...]]] = {}

    def pass_once(self) -> list[str]:
        """Give a plan without the absent machine to each job that has waited long enough for it; their ids."""
        if settings.HEADROOM_AWAY_S <= 0:
            return []
        waiting = Job.objects.filter(claimable(), need_device_kind=JOINED, attempt__gt=0).select_related("model")
        return [job.pk for job in waiting.order_by(*QUEUE_ORDER) if self._moves_on(job)]

    def _moves_on(self, job: Job) -> bool:
        rows = {row.name: row for row in Machine.objects.filter(name__in=job.spec[MACHINES])}
        away = [name for name in ranks_by_machine(job) if _is_away(rows.get(name))]
        there = [rows[name] for name in job.spec[MACHINES] if name in rows and _is_there(rows[name])]
        case = job.attempt, tuple(row.name for row in there)
        if not away or not there or self._in_vain.get(job.pk) == case:
            return False
        try:
            found = _move(job, there, away=away)
        except HeadroomError as error:
            logger.info("%s waits on for %s: %s", job.pk, " and ".join(away), error)
            found = False
        except Exception:  # a fault in one job's search keeps no other from its turn
            logger.exception("%s waits on for %s; a fault of the program", job.pk, " and ".join(away))
            found = False
        if found is not None:
            self._in_vain[job.pk] = case
        return bool(found)


def _is_away(row: Machine | None) -> bool:
    return row is None or row.last_seen_at < timezone.now() - timedelta(seconds=settings.HEADROOM_AWAY_S)


def _is_there(row: Machine) -> bool:
    return not row.draining and row.last_seen_at >= timezone.now() - timedelta(seconds=THERE_WITHIN_S)


def _move(job: Job, there: Sequence[Machine], *, away: Sequence[str]) -> bool | None:
    """None while the model's profile is being made. Raises HeadroomError where the job cannot go on on these machines."""
    ran = Plan.from_json(job.plan)
    if ran.layout.steps_alone:
        return False
    spec = {name: value for name, value in job.spec.items() if name not in JOINING_FIELDS or len(there) > 1}
    if len(there) > 1:
        spec[MACHINES] = [row.name for row in there]
    joining = joining_of(spec)
    place = place_of(there[0]) if joining is None else joined_place(joining)
    workload = from_json(TrainingWorkload, job.spec["workload"], path="workload")
    goal = replace(from_json(Goal, job.spec["goal"], path="goal"), num_devices=place.machine.total_devices)
    kept = keep_form(goal, ran, has_adapter=workload.adapter is not None) if has_checkpoint(job) else goal
    questions = resolve(AskedTraining(model=job.model, workload=workload, goal=kept), [place])
    if isinstance(questions, Waiting):
        return None
    found = find_answer(questions[0]).result.chosen
    gone = f"{' and '.join(away)} {'has' if len(away) == 1 else 'have'} been away for {format_duration(settings.HEADROOM_AWAY_S)}"
    change = f"{gone}; the job goes on with {' and '.join(row.name for row in there)}: {describe_change(ran, found.plan)}"
    return plan_job(
        job,
        spec={**spec, "goal": {**job.spec["goal"], "num_devices": goal.num_devices}},
        plan=found.plan.to_json(),
        prediction=found.prediction.to_json(),
        machine=there[0],
        change=change,
        when=claimable() & Q(attempt=job.attempt),
    )
