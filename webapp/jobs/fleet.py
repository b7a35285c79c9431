"""Reports what machines hold at this moment, and how well their runs were predicted.

Bytes and errors are everyone's to see; the names of jobs only of whoever may see the job.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import F, FloatField, Max
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Cast

from optimizer.base.serialize import to_json
from webapp.catalog.documents import machine_documents
from webapp.catalog.models import Machine
from webapp.clock import iso
from webapp.jobs.devices.room import live_holds, read_room
from webapp.jobs.links.known import link_documents, links_between
from webapp.jobs.models import LIVE_STATES, Attempt, Job, Sample
from webapp.jobs.queries import jobs_visible_to

MAX_RUNS_SHOWN = 200
"""The latest; older ones ran under an older driver and an older calibration."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """One job at work on a machine."""

    job_id: str
    """Empty where it is not the reader's to see, as is ``name``."""
    name: str
    worker: str
    devices: tuple[int, ...]
    """Places of its devices, counted from 0."""
    needs_bytes: int
    """Bytes set aside for the job, on all of its devices."""
    bytes_by_category: dict[str, int]
    """On its devices at its newest sample's peak; empty before the first one. Of several devices all are taken to hold what the
    first does, which reports for them."""

    @property
    def held_bytes(self) -> int:
        return sum(self.bytes_by_category.values())


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """A machine's devices now, as one."""

    memory_bytes: int
    num_devices: int
    free_bytes: int
    """Beside what is set aside for jobs at work."""
    holders: tuple[Holder, ...]
    """In the order in which they began."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One run, as it was predicted and as it was measured. None where one of the two is not known."""

    job_id: str
    """Empty where it is not the reader's to see, as is ``name``."""
    name: str
    ended_at: datetime | None
    predicted_bytes: int | None
    measured_bytes: int | None
    predicted_ms: float | None
    measured_ms: float | None


@dataclass(frozen=True, kw_only=True)
class Within:
    """Errors of predictions, relative to the measurement."""

    num_runs: int
    nine_of_ten: float
    worst: float


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Prediction errors of the runs that ended on one machine."""

    runs: tuple[Checked, ...]
    """Newest first."""
    peak: Within | None
    step: Within | None


def machine_document(user: Any, machine: Machine) -> dict[str, Any]:
    """A row of the list with the fields that ``GET /machines/{id}`` adds."""
    occupancy, accuracy = read_occupancy(user, machine), read_accuracy(user, machine)
    runs = [{**to_json(run), "ended_at": iso(run.ended_at)} for run in accuracy.runs]
    return {
        **machine_documents([machine])[0],
        "links": machine_links(machine),
        "memory": to_json(occupancy),
        "accuracy": {"peak": to_json(accuracy.peak), "step": to_json(accuracy.step), "runs": runs},
    }


def machine_links(machine: Machine) -> list[dict[str, Any]]:
    """The network to each other machine, as it was measured, by the other's name."""
    return link_documents(machine, links_between([machine])[machine.pk])


def read_occupancy(user: Any, machine: Machine) -> Occupancy:
    visible = set(jobs_visible_to(user).filter(state__in=LIVE_STATES).values_list("pk", flat=True))
    room = read_room(machine)
    holds = {hold.job_id: hold for hold in live_holds(machine, num_devices=room.num_devices)}
    jobs = list(Job.objects.filter(pk__in=holds).order_by("started_at", "pk"))
    newest = _newest_bytes(jobs)
    holders = []
    for job in jobs:
        hold, is_visible = holds[job.pk], job.pk in visible
        places = tuple(place for place, _ in hold.bytes_by_place)
        holder = Holder(
            job_id=job.pk if is_visible else "",
            name=job.name if is_visible else "",
            worker=hold.worker,
            devices=places,
            needs_bytes=sum(size for _, size in hold.bytes_by_place),
            bytes_by_category={category: size * len(places) for category, size in newest.get(job.pk, {}).items()},
        )
        holders.append(holder)
    return Occupancy(
        memory_bytes=room.total_bytes,
        num_devices=room.num_devices,
        free_bytes=room.total_bytes - sum(holder.needs_bytes for holder in holders),
        holders=tuple(holders),
    )


def _newest_bytes(jobs: Sequence[Job]) -> dict[str, dict[str, int]]:
    """By job, of the present attempt's newest sample: one query for the rows' keys and one for the rows."""
    measured = Sample.objects.filter(job__in=jobs, kind__in=("step", "generate"), attempt=F("job__attempt"))
    newest = measured.values("job_id").annotate(newest=Max("pk")).order_by().values_list("newest", flat=True)
    rows = Sample.objects.filter(pk__in=list(newest)).values_list("job_id", "data")
    return {job_id: data.get("device_bytes") or {} for job_id, data in rows}


def read_accuracy(user: Any, machine: Machine) -> Accuracy:
    """Errors of the predictions shown before the run, not of those a later calibration would make. A run over several machines
    says nothing of one of them.
    """
    ended = Attempt.objects.filter(
        machine=machine, members__isnull=True, prediction__isnull=False, measured__isnull=False, ended_at__isnull=False
    )
    rows = list(
        ended.annotate(
            predicted_bytes=_number("prediction", "device_peak_bytes"),
            measured_bytes=_number("measured", "device_peak_bytes"),
            predicted_ms=_number("prediction", "step_ms"),
            measured_ms=_number("measured", "step_ms"),
        )
        .order_by("-ended_at", "-pk")
        .values("job_id", "job__name", "ended_at", "predicted_bytes", "measured_bytes", "predicted_ms", "measured_ms")
    )[:MAX_RUNS_SHOWN]
    visible = set(jobs_visible_to(user).filter(pk__in={row["job_id"] for row in rows}).values_list("pk", flat=True))
    runs = tuple(_checked(row, is_visible=row["job_id"] in visible) for row in rows)
    return Accuracy(
        runs=runs,
        peak=_within((run.predicted_bytes, run.measured_bytes) for run in runs),
        step=_within((run.predicted_ms, run.measured_ms) for run in runs),
    )


def _number(column: str, key: str) -> Cast:
    """Read single fields of a document, which is large: a prediction holds a timeline."""
    return Cast(KeyTextTransform(key, column), FloatField())


def _checked(row: Mapping[str, Any], *, is_visible: bool) -> Checked:
    return Checked(
        job_id=row["job_id"] if is_visible else "",
        name=row["job__name"] if is_visible else "",
        ended_at=row["ended_at"],
        predicted_bytes=_whole(row["predicted_bytes"]),
        measured_bytes=_whole(row["measured_bytes"]),
        predicted_ms=row["predicted_ms"],
        measured_ms=row["measured_ms"],
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _within(pairs: Iterable[tuple[float | None, float | None]]) -> Within | None:
    errors = sorted(abs(predicted / measured - 1) for predicted, measured in pairs if predicted and measured)
    if not errors:
        return None
    at = -(-len(errors) * 9 // 10) - 1
    return Within(num_runs=len(errors), nine_of_ten=errors[at], worst=errors[-1])
