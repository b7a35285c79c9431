"""The Celery worker: ``celery -A worker.app worker --without-gossip --without-mingle --without-heartbeat``.

Celery carries hints and nothing else. The work is done by the supervisor, which lives in the worker's main process and goes on
without a broker. TERM drains: running attempts checkpoint, their jobs go back to the queue.
"""

from typing import Any

from worker import django_setup  # noqa: F401

# isort: split
from celery import Celery, signals
from django.conf import settings

from webapp.schema import end_on_newer_database
from webapp.wire.broker import celery_settings
from webapp.wire.transport import use_patient_transport
from worker.supervisor import drain_supervisor, join_supervisor, start_supervisor


def _make_app() -> Celery:
    use_patient_transport()
    app = Celery("headroom", include=["worker.tasks"])
    app.conf.update(celery_settings(settings.REDIS_URL))
    # A thread is enough to set an event. Not solo: there the early acknowledgement waits behind the task.
    app.conf.update(worker_pool="threads", worker_concurrency=1)
    return app


def _start_supervisor(**_: Any) -> None:
    end_on_newer_database()
    start_supervisor()


def _drain(**_: Any) -> None:
    """In a signal handler: only an event is set."""
    drain_supervisor()


def _wait_for_supervisor(**_: Any) -> None:
    """Also reached when Celery itself has failed; then the process must end too, and be started afresh."""
    join_supervisor()


signals.worker_init.connect(_start_supervisor)
signals.worker_shutting_down.connect(_drain)
signals.worker_shutdown.connect(_wait_for_supervisor)
app = _make_app()
