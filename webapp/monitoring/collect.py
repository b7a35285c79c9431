"""Collects the figures of ``/metrics`` beside requests: read from the database when it is asked, so that nothing has to
be kept in step, and every process shows the same.
"""

from collections.abc import Iterator
from typing import Any

from django.db.models import Count, Max, Min, Q
from django.utils import timezone
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from webapp.attempts.leading import find_alarm, num_expired_leases, silent_s
from webapp.batches.models import OPEN_STATUSES, Batch
from webapp.catalog.documents import ONLINE_WITHIN
from webapp.catalog.models import Machine
from webapp.jobs.devices.room import read_room
from webapp.jobs.models import USER_JOB_KINDS, Job, Kind, Sample, State
from webapp.webhooks.models import Delivery
from webapp.webhooks.models import State as DeliveryState


class ServiceCollector:
    """A collector as the Prometheus library defines it."""

    def collect(self) -> Iterator[Metric]:
        yield from _jobs()
        yield from _queue()
        yield from _machines()
        yield from _reconciler()
        yield _samples()
        yield _batches()
        yield _deliveries()


def _gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"headroom_{name}", text, labels=labels)


def _jobs() -> Iterator[Metric]:
    found = _gauge("jobs", "Jobs by kind and state.", ("kind", "state"))
    counted = {
        (row["kind"], row["state"]): row["number"]
        for row in Job.objects.order_by().values("kind", "state").annotate(number=Count("pk"))
    }
    for kind in Kind.values:
        for state in State.values:
            found.add_metric((kind, state), counted.get((kind, state), 0))
    yield found


def _queue() -> Iterator[Metric]:
    waiting = Q(state=State.QUEUED, kind__in=USER_JOB_KINDS)
    seen: dict[str, Any] = Job.objects.filter(waiting).aggregate(number=Count("pk"), oldest=Min("created_at"))
    depth = _gauge("queue_depth", "Jobs that wait, paused ones too.")
    depth.add_metric((), seen["number"])
    yield depth
    age = _gauge("queue_oldest_age_seconds", "Age of the job that has waited longest; 0 where none waits.")
    age.add_metric((), (timezone.now() - seen["oldest"]).total_seconds() if seen["oldest"] else 0.0)
    yield age


def _machines() -> Iterator[Metric]:
    labels = ("machine", "device")
    online = _gauge("worker_online", "1 while the machine's worker is heard of and takes jobs.", labels)
    total = _gauge("device_memory_bytes", "Memory of the machine's devices.", labels)
    taken = _gauge("device_memory_reserved_bytes", "Of it, what jobs at work were given.", labels)
    now = timezone.now()
    for machine in Machine.objects.defer("calibration").order_by("name"):
        room = read_room(machine)
        who = (machine.name, room.kind)
        online.add_metric(who, float(now - machine.last_seen_at < ONLINE_WITHIN and not machine.draining))
        total.add_metric(who, room.total_bytes)
        taken.add_metric(who, room.total_bytes - room.free_bytes)
    yield from (online, total, taken)


def _reconciler() -> Iterator[Metric]:
    silent = _gauge("reconciler_silent_seconds", "Time since a reconciler last did a whole pass; none where none ever did.")
    if (seconds := silent_s()) is not None:
        silent.add_metric((), seconds)
    expired = _gauge("leases_expired", "Jobs at work whose lease ran out; more than 0 for a minute is a fault.")
    expired.add_metric((), num_expired_leases())
    alarm = _gauge("reconciler_alarm", "1 while jobs need a reconciler and none has done a whole pass for a minute.")
    alarm.add_metric((), float(bool(find_alarm())))
    yield from (silent, expired, alarm)


def _samples() -> Metric:
    """The highest number, not a count of rows: of millions a count would take seconds."""
    found = CounterMetricFamily("headroom_samples_stored", "Telemetry samples numbered by the database so far.")
    found.add_metric((), Sample.objects.aggregate(highest=Max("pk"))["highest"] or 0)
    return found


def _batches() -> Metric:
    found = _gauge("batches_open", "Batches of the OpenAI API that are not done.")
    found.add_metric((), Batch.objects.filter(status__in=OPEN_STATUSES).count())
    return found


def _deliveries() -> Metric:
    found = _gauge("webhook_deliveries", "Messages to webhooks of the last 30 days, by state.", ("state",))
    rows = Delivery.objects.order_by().values("state").annotate(number=Count("pk"))
    counted = {row["state"]: row["number"] for row in rows}
    for state in DeliveryState.values:
        found.add_metric((state,), counted.get(state, 0))
    return found
