"""Corrects a machine's calibration by attempts: those that succeeded, and what those that ran out of memory were short of."""

import logging
from collections.abc import Sequence
from typing import Any

from django.db import transaction

from optimizer.base.errors import HeadroomError
from optimizer.base.serialize import from_json
from optimizer.estimate.generation.runs import price_run
from optimizer.estimate.job.shortfalls import Shortfall, remember_shortfalls
from optimizer.estimate.prediction import Prediction
from optimizer.hardware.calibration import TimedRun, learn_generation, update_calibration
from optimizer.hardware.machine import Machine as MachineSpec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.passes.run import MAX_TIMED, TimedPass
from webapp.catalog.models import Machine
from webapp.jobs.models import Attempt, Kind
from webapp.planning.search.profiles import known_generation_profile_of

logger = logging.getLogger(__name__)


def price_generation(attempt: Attempt, result: dict[str, Any] | None) -> TimedRun | None:
    """Price what an attempt of a generate job ran. None where there is nothing to price it by, and for other kinds.

    Takes a tenth of a second, so call it outside the transaction.
    """
    measured = (result or {}).get("measured") or {}
    if not measured.get("passes") or attempt.job.kind != Kind.GENERATE or attempt.plan is None or attempt.machine is None:
        return None
    profile = known_generation_profile_of(attempt.job.model)
    if profile is None:
        return None
    try:
        return price_run(
            profile,
            plan=GenerationPlan.from_json(attempt.plan),
            passes=[from_json(TimedPass, each, path="passes") for each in measured["passes"][:MAX_TIMED]],
            draws=bool(measured.get("draws")),
            machine=MachineSpec.from_json(attempt.machine.document),
        )
    except HeadroomError as error:
        logger.warning("nothing is learnt from %s: %s", attempt.job_id, error)
        return None


def learn_shortfalls(machine: Machine, *, work: str, shown: Sequence[Shortfall]) -> None:
    """Keep by how much stages of this work were predicted too low here, so that the next search of it leaves as much free."""
    if not shown:
        return
    with transaction.atomic():
        row = Machine.objects.select_for_update().get(pk=machine.pk)
        row.calibration = remember_shortfalls(row.calibration, work, shown)
        row.save(update_fields=["calibration"])


def calibrate(attempt: Attempt, result: dict[str, Any] | None, *, generation: TimedRun | None) -> None:
    """Inside the transaction. Nothing is learnt from a run beside others. generation: from ``price_generation``."""
    if attempt.is_shared:
        return
    measured = (result or {}).get("measured")
    is_step = attempt.job.kind == Kind.TRAIN and bool(measured) and attempt.prediction is not None
    if attempt.machine_id is None or not (is_step or generation is not None):
        return
    machine = Machine.objects.select_for_update().get(pk=attempt.machine_id)
    if generation is not None:
        machine.calibration = learn_generation(machine.calibration, generation)
    else:
        prediction = Prediction.from_json(attempt.prediction)
        if {rank.device for rank in prediction.ranks} - {machine.document["device"]["name"]}:
            return  # corrections are of the machine's first kind of device
        machine.calibration = update_calibration(machine.calibration, prediction=prediction, measured=measured or {})
    machine.save(update_fields=["calibration"])
