"""The queue: jobs in the order in which they will be claimed, and why each of them waits.

The order is the claim's own: higher priority first, then older. A machine takes the first job that it can hold, so a small job
may start before a larger one that stands ahead of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from django.utils import timezone

from optimizer.base.units import format_bytes, format_duration
from webapp.catalog.documents import ONLINE_WITHIN
from webapp.catalog.models import Machine
from webapp.jobs.claiming import free_bytes
from webapp.jobs.models import LIVE_STATES, Job, Kind, State
from webapp.jobs.queries import jobs_visible_to

Reason = Literal["paused", "not_yet", "no_machine", "offline", "busy", "next"]


@dataclass(frozen=True, kw_only=True)
class MachineNow:
    """One machine as a claim would see it."""

    id: str
    name: str
    device_kind: str
    memory_bytes: int
    free_bytes: int
    """Device bytes left beside what live jobs there need."""
    takes_jobs: bool
    """Heard of lately, and not draining."""

    def suits(self, job: Job) -> bool:
        """Report whether the machine could ever hold the job."""
        return job.need_device_kind in ("", self.device_kind) and job.need_device_bytes <= self.memory_bytes


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """One queued job."""

    job: Job
    position: int
    """From 1, among all people's jobs."""
    reason: Reason
    sentence: str
    machines: tuple[str, ...]
    """Names of those that could hold it, the ones that take jobs first."""


@dataclass(frozen=True, kw_only=True)
class Queue:
    """The queue as one person sees it: their own jobs, at their place among all."""

    waiting: tuple[Waiting, ...]
    num_waiting: int
    """Counted over all people."""
    live: tuple[Job, ...]
    """Being carried out."""


def read_queue(user: Any) -> Queue:
    visible = jobs_visible_to(user).select_related("model", "machine")
    own = {job.pk: job for job in visible.filter(state=State.QUEUED)}
    order = list(
        Job.objects.filter(state=State.QUEUED)
        .exclude(kind=Kind.PROFILE)
        .order_by("-priority", "created_at", "id")
        .values_list("pk", flat=True)
    )
    machines = _machines()
    waiting = [
        _explain(own[pk], position, machines) for position, pk in enumerate(order, start=1) if pk in own
    ]
    live = visible.filter(state__in=LIVE_STATES).order_by("started_at", "pk")
    return Queue(waiting=tuple(waiting), num_waiting=len(order), live=tuple(live))


def _machines() -> list[MachineNow]:
    now = timezone.now()
    return [
        MachineNow(
            id=row.pk,
            name=row.name,
            device_kind=row.document["device"]["kind"],
            memory_bytes=int(row.document["device"]["memory_bytes"]),
            free_bytes=free_bytes(row),
            takes_jobs=now - row.last_seen_at < ONLINE_WITHIN and not row.draining,
        )
        for row in Machine.objects.order_by("name")
    ]


def _explain(job: Job, position: int, machines: Sequence[MachineNow]) -> Waiting:
    suiting = sorted((machine for machine in machines if machine.suits(job)), key=lambda machine: not machine.takes_jobs)
    reason, sentence = next(_reasons(job, machines, suiting))
    return Waiting(
        job=job,
        position=position,
        reason=reason,
        sentence=sentence,
        machines=tuple(machine.name for machine in suiting),
    )


def _reasons(
    job: Job, machines: Sequence[MachineNow], suiting: Sequence[MachineNow]
) -> Iterator[tuple[Reason, str]]:
    """The first that holds is the one."""
    if job.pause_requested_at is not None:
        yield "paused", "Paused: it may not start until it is resumed."
    wait_s = (job.not_before - timezone.now()).total_seconds() if job.not_before is not None else 0.0
    if wait_s > 0:
        yield "not_yet", f"Attempt {job.attempt} failed; the next one may start in {format_duration(wait_s)}."
    if not suiting:
        yield "no_machine", _nothing_suits(job, machines)
    ready = [machine for machine in suiting if machine.takes_jobs]
    if not ready:
        names = ", ".join(machine.name for machine in suiting)
        yield "offline", f"Only {names} could hold it, and no worker there takes jobs at present."
    if not any(machine.free_bytes >= job.need_device_bytes for machine in ready):
        most = max(ready, key=lambda machine: machine.free_bytes, default=None)
        if most is not None:
            yield "busy", (
                f"It needs {format_bytes(job.need_device_bytes)}; jobs at work leave at most "
                f"{format_bytes(max(0, most.free_bytes))} free, on {most.name}."
            )
    yield "next", "It starts as soon as a worker is free and what stands ahead of it is taken."


def _nothing_suits(job: Job, machines: Sequence[MachineNow]) -> str:
    need = f"{job.need_device_kind or 'any'} device with {format_bytes(job.need_device_bytes)}"
    if not machines:
        return f"It needs a {need}; no machine has run a worker yet."
    largest = max(machines, key=lambda machine: machine.memory_bytes)
    return (
        f"It needs a {need}; no known machine has one (the largest is {largest.name}, {largest.device_kind}, "
        f"{format_bytes(largest.memory_bytes)}). Clone it with a smaller budget, or start a worker on a larger machine."
    )
