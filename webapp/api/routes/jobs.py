"""``/plans``, ``/jobs`` and what belongs to a job."""

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from ninja import Query, Router, Schema, Status
from ninja.schema import DjangoGetter
from pydantic import Field, model_validator

from optimizer.base.errors import InvalidInput
from webapp.accounts.access import has_role, role_in
from webapp.accounts.audit import note_target, record_with_row
from webapp.accounts.models import Role
from webapp.api.schemas import ModelRow
from webapp.catalog.documents import model_documents
from webapp.http.idempotency import idempotent, remember
from webapp.http.paging import page_of
from webapp.jobs import about, actions, documents
from webapp.jobs.checkpoints import export_job
from webapp.jobs.metrics import DEFAULT_MAX_POINTS, MAX_POINTS_ALLOWED, job_metrics
from webapp.jobs.models import LIVE_STATES, Job, State
from webapp.jobs.queries import LARGE_DOCUMENTS, artifacts_visible_to, deleted_jobs_visible_to, jobs_visible_to
from webapp.jobs.specs.exporting import read_export
from webapp.jobs.trained_model import create_trained_model
from webapp.planning.submitting import submit_job

router = Router()


MOST_CANCELLED: Final = 1000
"""Jobs that one request asks the end of."""
_SPEC_FIELDS: Final = frozenset({"kind", "name", "model", "dataset", "workload"})
"""Any of these at the top of a body makes it a spec."""


class JobRequest(Schema, extra="forbid"):
    """A spec, and the offer to take. A spec alone, as ``/plans`` takes it, is read as one."""

    spec: dict[str, Any]
    plan_id: str | None = Field(default=None, max_length=60)
    override: bool = False
    when_ready: bool = False
    """Take the job although its model is still being profiled; it starts once a plan was found."""

    @model_validator(mode="before")
    @classmethod
    def _take_bare_spec(cls, given: Any) -> Any:
        sent = given._obj if isinstance(given, DjangoGetter) else given
        if not isinstance(sent, dict) or "spec" in sent or not _SPEC_FIELDS & sent.keys():
            return given
        around = {name: sent[name] for name in ("plan_id", "override", "when_ready") if name in sent}
        return {"spec": {name: value for name, value in sent.items() if name not in around}, **around}


class ModelRequest(Schema, extra="forbid"):
    """name: of the new model; the job's unless given, with a number where that is taken."""

    name: str | None = None


class ExportRequest(Schema, extra="forbid"):
    """step: of the checkpoint; the newest unless given. export: fields of ``workload.export``; the job's own unless given."""

    step: int | None = None
    export: dict[str, Any] | None = None


class CancelRequest(Schema, extra="forbid"):
    """``save`` stops at a checkpoint and exports its weights, ``keep`` keeps the checkpoint alone, ``discard`` stops at once."""

    mode: Literal["save", "keep", "discard"] = "save"


class CancelManyRequest(CancelRequest):
    """``ids``, or every one of your jobs in these states that have not ended and, where it is given, with this tag."""

    ids: list[Annotated[str, Field(max_length=60)]] | None = Field(default=None, min_length=1, max_length=MOST_CANCELLED)
    state: list[Literal["queued", "starting", "running"]] | None = Field(default=None, min_length=1)
    tag: str = Field(default="", max_length=60)

    @model_validator(mode="after")
    def _name_some(self) -> "CancelManyRequest":
        if (self.ids is None) == (self.state is None and not self.tag):
            raise ValueError("ids or state and tag are needed, not both: name the jobs, or say which of yours")
        return self


@router.post("/jobs", response={201: dict[str, Any]}, tags=["jobs"])
@idempotent
def create_job(request: HttpRequest, body: JobRequest) -> HttpResponse:
    """Submit a job; without ``plan_id`` the chosen plan of a fresh search is taken."""
    remembered: list[HttpResponse] = []

    def keep(job: Job) -> None:
        remembered.append(_created(request, job, status=201))
        record_with_row(request)

    submit_job(
        request.user,
        spec=body.spec,
        plan_id=body.plan_id,
        override=body.override,
        when_ready=body.when_ready,
        actor=_actor(request),
        and_then=keep,
    )
    return remembered[0]


@router.get("/jobs", response=dict[str, Any], tags=["jobs"])
def list_jobs(
    request: HttpRequest, state: str = "", q: str = "", cursor: str = "", page_size: str = ""
) -> dict[str, Any]:
    """Your jobs, newest first, without their spec, plan and prediction. ``state`` may name several, parted by commas; ``q`` is
    searched in names."""
    rows = jobs_visible_to(request.user).defer(*LARGE_DOCUMENTS)
    if state:
        rows = rows.filter(state__in=_states(state))
    if q:
        rows = rows.filter(name__icontains=q)
    return page_of(request, rows, lambda jobs: [documents.job_row_document(job) for job in jobs])


@router.post("/jobs/cancel", response=dict[str, Any], tags=["jobs"])
@idempotent
def cancel_jobs(request: HttpRequest, body: CancelManyRequest) -> HttpResponse:
    """Ask for the end of up to 1,000 jobs at once. Each gets its own answer: ``cancelled`` (it waited), ``asked_to_stop``,
    ``already_asked``, ``ended``, ``forbidden`` or ``not_found``. ``num_left``: jobs that the filter
    names beyond those; ask again."""
    rows = jobs_visible_to(request.user)
    if body.ids is not None:
        rows, num_left = rows.filter(pk__in=body.ids), 0
    else:
        rows = rows.filter(state__in=body.state or ["queued", *LIVE_STATES])
        rows = rows.filter(tags__icontains=f'"{body.tag}"') if body.tag else rows
        num_left = max(0, rows.count() - MOST_CANCELLED)
    found = dict(rows.order_by("-id").values_list("pk", "project_id")[:MOST_CANCELLED])
    allowed = [job_id for job_id, project_id in found.items() if _may_change(request, project_id)]
    with transaction.atomic():
        outcomes: dict[str, str] = {**actions.cancel_jobs(allowed, mode=body.mode, actor=_actor(request))}
        asked = found if body.ids is None else dict.fromkeys(body.ids)
        results = [
            {"id": job_id, "outcome": outcomes.get(job_id, "forbidden" if job_id in found else "not_found")} for job_id in asked
        ]
        note_target(request, ",".join(outcomes)[:200], detail=f"{len(outcomes)} jobs, {body.mode}")
        return remember(request, status=200, body={"results": results, "num_left": num_left})


def _may_change(request: HttpRequest, project_id: str | None) -> bool:
    """The rule for one job: a member of its project may, and where it has none who administers the service."""
    if project_id is None:
        return bool(request.user.is_superuser)
    return has_role(role_in(request.user, project_id), Role.MEMBER)


@router.get("/jobs/{job_id}", response=dict[str, Any], tags=["jobs"])
def get_job(request: HttpRequest, job_id: str) -> dict[str, Any]:
    return documents.job_document(_job(request, job_id))


class AboutRequest(Schema, extra="forbid"):
    """Fields that are left out stay as they are."""

    name: str | None = None
    tags: list[str] | None = None
    notes: str | None = None


@router.patch("/jobs/{job_id}", response=dict[str, Any], tags=["jobs"])
def change_job(request: HttpRequest, job_id: str, body: AboutRequest) -> dict[str, Any]:
    """Give a job another name, tags or notes."""
    job = about.describe_job_as(_job(request, job_id), name=body.name, tags=body.tags, notes=body.notes)
    return documents.job_document(job)


@router.delete("/jobs/{job_id}", response=dict[str, Any], tags=["jobs"])
def delete_job(request: HttpRequest, job_id: str) -> dict[str, Any]:
    """Delete a job that has ended; it can be restored for seven days, then its files go."""
    return documents.job_document(about.delete_job(_job(request, job_id)))


@router.post("/jobs/{job_id}/restore", response=dict[str, Any], tags=["jobs"])
def restore_job(request: HttpRequest, job_id: str) -> dict[str, Any]:
    """Have a deleted job back."""
    job = deleted_jobs_visible_to(request.user).select_related("machine").filter(pk=job_id).first()
    if job is None:
        raise Http404
    return documents.job_document(about.restore_job(job))


class SharedLink(Schema):
    """Address of a run that anyone may read."""

    url: str


@router.post("/jobs/{job_id}/share", response=SharedLink, tags=["jobs"])
def share_job(request: HttpRequest, job_id: str) -> dict[str, Any]:
    """Make the link under which anyone may read the run's figures, charts, plan and configuration; again gives the same one."""
    return {"url": request.build_absolute_uri(about.share_job(_job(request, job_id)))}


@router.delete("/jobs/{job_id}/share", response={204: None}, tags=["jobs"])
def unshare_job(request: HttpRequest, job_id: str) -> Status[None]:
    """Take the link back."""
    about.unshare_job(_job(request, job_id))
    return Status(204, None)


@router.post("/jobs/{job_id}/cancel", response={200: dict[str, Any], 202: dict[str, Any]}, tags=["jobs"])
@idempotent
def cancel_job(request: HttpRequest, job_id: str, body: CancelRequest | None = None) -> HttpResponse:
    """Ask for the end: 202 the first time, 200 when it was asked before, 409 when the job has ended."""
    job = _job(request, job_id)
    with transaction.atomic():
        mode = body.mode if body else "save"
        is_new = actions.cancel_job(job, mode=mode, actor=_actor(request))
        job.refresh_from_db()
        return remember(request, status=202 if is_new else 200, body=documents.job_document(job))


@router.post("/jobs/{job_id}/pause", response={202: dict[str, Any]}, tags=["jobs"])
@idempotent
def pause_job(request: HttpRequest, job_id: str) -> HttpResponse:
    """A queued job may not start; a running one stops at a checkpoint."""
    return _act(request, job_id, actions.pause_job)


@router.post("/jobs/{job_id}/resume", response={202: dict[str, Any]}, tags=["jobs"])
@idempotent
def resume_job(request: HttpRequest, job_id: str) -> HttpResponse:
    """Lift a pause."""
    return _act(request, job_id, actions.resume_job)


@router.post("/jobs/{job_id}/retry", response={202: dict[str, Any]}, tags=["jobs"])
@idempotent
def retry_job(request: HttpRequest, job_id: str) -> HttpResponse:
    """The same spec and plan again as a new job, which is the answer; an ended job never moves."""
    job = _job(request, job_id)
    with transaction.atomic():
        return _created(request, actions.retry_job(job, actor=_actor(request), owner=request.user), status=202)


@router.post("/jobs/{job_id}/export", response={201: dict[str, Any]}, tags=["jobs"])
@idempotent
def export_checkpoint(request: HttpRequest, job_id: str, body: ExportRequest | None = None) -> HttpResponse:
    """Write the weights of one of a training run's checkpoints, by a job of its own, which is the answer and needs no device.

    409 where there is no such checkpoint; the job may be running, and goes on.
    """
    job, asked = _job(request, job_id), body or ExportRequest()
    export = None if asked.export is None else read_export(job, asked.export)
    remembered: list[HttpResponse] = []

    def keep(made: Job) -> None:
        remembered.append(_created(request, made, status=201))

    export_job(job, step=asked.step, export=export, actor=_actor(request), owner=request.user, and_then=keep)
    return remembered[0]


@router.post("/jobs/{job_id}/model", response={201: ModelRow}, tags=["jobs"])
@idempotent
def create_model_of_job(request: HttpRequest, job_id: str, body: ModelRequest | None = None) -> HttpResponse:
    """Make a model of a training run's weights, to generate with or to train further; answered as ``POST /models``.

    409 while the run goes on, where it left no whole model, where its files are gone, and for a name that is taken.
    """
    model = create_trained_model(_job(request, job_id), name=(body.name if body else None) or "")
    note_target(request, model.pk, detail=model.name)
    with transaction.atomic():
        document = model_documents([model])[0]
        return remember(request, status=201, body=document, location=f"/api/v1/models/{model.pk}")


@router.get("/jobs/{job_id}/metrics", response=dict[str, Any], tags=["jobs"])
def get_metrics(
    request: HttpRequest,
    job_id: str,
    max_points: Annotated[int, Query(ge=3, le=MAX_POINTS_ALLOWED)] = DEFAULT_MAX_POINTS,
    fields: Annotated[str, Query(max_length=500)] = "",
) -> dict[str, Any]:
    """Measurements: steps (thinned so that no peak is lost), evaluations, the latest timeline within a step.

    ``fields``: of steps, parted by commas, beside ``kind``, ``attempt``, ``step`` and ``time_s``; all without it.
    """
    wanted = [name for name in fields.split(",") if name] or None
    return job_metrics(_job(request, job_id).pk, max_points=max_points, fields=wanted)


@router.get("/jobs/{job_id}/artifacts", response=dict[str, Any], tags=["jobs"])
def list_artifacts(request: HttpRequest, job_id: str, cursor: str = "", page_size: str = "") -> dict[str, Any]:
    """Files the job left, with their sha256."""
    rows = artifacts_visible_to(request.user).filter(job=_job(request, job_id))
    return page_of(request, rows, lambda found: [documents.artifact_document(row) for row in found])


@router.get("/jobs/{job_id}/checkpoints", response=dict[str, Any], tags=["jobs"])
def list_checkpoints(request: HttpRequest, job_id: str, cursor: str = "", page_size: str = "") -> dict[str, Any]:
    """Resumable checkpoints, newest first."""
    rows = _job(request, job_id).checkpoints.all()
    return page_of(request, rows, lambda found: [documents.checkpoint_document(row) for row in found])


@router.get("/jobs/{job_id}/attempts", response=dict[str, Any], tags=["jobs"])
def list_attempts(request: HttpRequest, job_id: str) -> dict[str, Any]:
    """The attempts in order, all at once: each with its plan, how that differs from the last one, its end, and the cause where
    memory ran out.
    """
    attempts = _job(request, job_id).attempts.select_related("job").prefetch_related("members")
    return {"results": documents.attempt_documents(attempts), "next": None, "previous": None}


def _job(request: HttpRequest, job_id: str) -> Job:
    job = jobs_visible_to(request.user).filter(pk=job_id).first()
    if job is None:
        raise Http404
    return job


def _actor(request: HttpRequest) -> str:
    return f"user:{request.user.get_username()}"


def _act(request: HttpRequest, job_id: str, action: Callable[..., Job]) -> HttpResponse:
    job = _job(request, job_id)
    with transaction.atomic():
        return remember(
            request, status=202, body=documents.job_document(action(job, actor=_actor(request)))
        )


def _created(request: HttpRequest, job: Job, *, status: int) -> HttpResponse:
    note_target(request, job.pk, project_id=job.project_id or "")
    return remember(request, status=status, body=documents.job_document(job), location=f"/api/v1/jobs/{job.pk}")


def _states(text: str) -> list[str]:
    states = text.split(",")
    unknown = [state for state in states if state not in State.values]
    if unknown:
        raise InvalidInput(
            f"state is {unknown[0][:40]!r}; allowed: {', '.join(State.values)}",
            field="state",
            value=unknown[0][:40],
            allowed=list(State.values),
        )
    return states
