"""The job that holds a model: found, or started, and described in words while it comes up.

One job for each model and project: base and tuned by adapters are the same job, a run's whole model another.
"""

from typing import Any

from django.db import transaction
from django.utils import timezone

from optimizer.base.errors import HeadroomError
from optimizer.estimate.serving import DEFAULT_ROWS, predict_serving
from optimizer.models.spec import read_model_spec
from webapp.accounts.access import project_of_job
from webapp.catalog.documents import ONLINE_WITHIN
from webapp.catalog.models import Machine, Model
from webapp.jobs.actions import create_job
from webapp.jobs.devices.room import largest_device
from webapp.jobs.models import LIVE_STATES, TERMINAL_STATES, Job, Kind, State
from webapp.jobs.queries import jobs_visible_to
from webapp.jobs.turns import require_queue_room
from webapp.serving.names import Target

IDLE_S = 600
"""Without anybody who asks, a model is let go after so long."""
_PHASES = {"loading": "the model is being loaded", "tokenizing": "the model is being loaded"}


class NobodyServes(HeadroomError):
    """No worker is there that could hold a model."""

    code = "no_worker"


class ServerLost(HeadroomError):
    """The job that held the model, or was to, has failed."""

    code = "server_lost"


def hold(user: Any, target: Target, *, device_budget_bytes: int | None = None) -> Job:
    """The job that holds the model, started where there is none.

    Raises NobodyServes where no worker is there, Forbidden for who may not run jobs, LimitReached where too many wait,
    InvalidInput where no budget of any machine holds it.
    """
    held = find_held(user, target)
    if held is None or held.state == State.QUEUED:
        require_worker()
    if held is not None:
        return held
    return _start(user, target, device_budget_bytes)


def find_held(user: Any, target: Target) -> Job | None:
    """A job that holds the model or is about to, newest first; not one that is being stopped."""
    rows = jobs_visible_to(user).filter(kind=Kind.SERVE, model=target.model, cancel_requested_at__isnull=True)
    rows = rows.exclude(state__in=TERMINAL_STATES).filter(pause_requested_at__isnull=True)
    return rows.filter(spec__weights_job=target.weights_job).order_by("-pk").first()


def waiting_words(job: Job) -> str:
    """The thing that is waited for, in a sentence."""
    if job.state == State.QUEUED:
        return "waiting for a free place on a machine"
    if is_up(job):
        return "waiting for a free place beside others"
    return _PHASES.get(job.phase, "the model's process is starting")


def is_up(job: Job) -> bool:
    return job.state in LIVE_STATES and job.phase == "serving"


def _start(user: Any, target: Target, device_budget_bytes: int | None) -> Job:
    project = project_of_job(user, (target.model, target.run))
    require_queue_room(user, project)
    need = predict_serving(
        read_model_spec(target.model.config), budget_bytes=_budget_of(target.model, device_budget_bytes), num_rows=DEFAULT_ROWS
    )
    spec = {
        "kind": Kind.SERVE.value,
        "name": f"{target.run.name if target.run and target.weights_job else target.model.name} answers",
        "model": target.model.pk,
        "weights_job": target.weights_job,
        "serving": {"num_rows": need.num_rows, "context_tokens": need.context_tokens, "weights": "same", "idle_s": IDLE_S},
        "goal": {"device_budget_bytes": device_budget_bytes or need.peak_bytes},
    }
    with transaction.atomic():
        # two that ask at once wait for each other here; the second finds the first one's job
        Model.objects.select_for_update(of=("self",)).get(pk=target.model.pk)
        if (held := find_held(user, target)) is not None:
            return held
        return create_job(
            owner=user,
            project=project,
            spec=spec,
            model=target.model,
            dataset=None,
            plan=None,
            prediction=need.to_json(),
            machine=None,
            kind=Kind.SERVE,
            actor=f"user:{user.get_username()}",
            num_steps=0,
        )


def _budget_of(model: Model, wanted_bytes: int | None) -> int | None:
    """The budget that was asked for; else the largest machine's memory where the whole of it would be needed."""
    if wanted_bytes is not None:
        return wanted_bytes
    sizes = [int(largest_device(row)["memory_bytes"]) for row in Machine.objects.all()]
    return max(sizes, default=None)


def require_worker() -> None:
    """Raises NobodyServes."""
    if not Machine.objects.filter(last_seen_at__gt=timezone.now() - ONLINE_WITHIN, draining=False).exists():
        raise NobodyServes("no worker is running, and so nothing can answer", hint="Start one: headroom up, or make up.")
