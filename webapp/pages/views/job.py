"""One job: its live page, the parts of it that are fetched again as it moves, the tables behind its charts, its buttons.

A job of someone else does not exist here: the same 404 as for an unknown id.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.db.models import F, QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.template.loader import render_to_string
from django.urls import reverse
from django.views.decorators.http import require_GET, require_POST

from optimizer.base.categories import CATEGORIES, CATEGORY_LABELS
from optimizer.base.errors import HeadroomError, InvalidInput
from optimizer.base.units import format_bytes
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.prediction import Prediction
from optimizer.models.files.gguf_export.kinds import ARCHITECTURES as GGUF_ARCHITECTURES
from optimizer.models.spec import read_model_spec
from optimizer.plan.explain.generation import explain_generation_plan
from optimizer.plan.explain.training import explain_plan
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.plan import Plan
from webapp.accounts.audit import note_target
from webapp.catalog.errors import ModelExists
from webapp.catalog.models import Dataset, Model
from webapp.catalog.queries import datasets_visible_to, models_visible_to
from webapp.jobs.about import shared_path
from webapp.jobs.actions import CancelMode, cancel_job, pause_job, resume_job, retry_job
from webapp.jobs.checkpoints import export_job, exports_of, is_there
from webapp.jobs.documents import attempt_documents, job_document
from webapp.jobs.models import Job, Kind, State
from webapp.jobs.queries import jobs_visible_to
from webapp.jobs.specs.copying import copies_of
from webapp.jobs.specs.exporting import read_export
from webapp.jobs.specs.generation import generation_workload, spec_of_job
from webapp.jobs.specs.training import find_visible
from webapp.jobs.trained_model import create_trained_model, what_is_left
from webapp.pages.forms.pins import flat_pins
from webapp.pages.pictures.job import job_pictures
from webapp.pages.presentation import comparisons, plan_rows, setting_words
from webapp.pages.shown.files import find_in_log, log_after, log_tail, newest_answers, sample_text
from webapp.pages.shown.job_head import budget_bytes, describe_job
from webapp.pages.shown.next_steps import NAMES, edit_url
from webapp.pages.shown.places import PlacePicture, places_of
from webapp.pages.shown.rank_rows import rank_rows
from webapp.pages.shown.tables import CHARTS, build_table
from webapp.pages.words.plan_names import devices_differ, layout_words, plan_name, steps_alone

TABS = ("plan", "execution", "checkpoints", "samples", "logs", "events", "files")


@require_GET
@login_required
def job_page(request: HttpRequest, job_id: str) -> HttpResponse:
    job = _get(request, job_id)
    tab = request.GET.get("tab", "") or _first_tab(job)
    context = {
        **_head_context(request, job),
        **_tab_context(request, job, tab if tab in TABS else TABS[0]),
        "facts": {
            "job": job_document(job),
            "budget_bytes": budget_bytes(job),
            "devices_differ": devices_differ(job.plan or {}),
            "categories": [{"key": category, "label": CATEGORY_LABELS[category]} for category in CATEGORIES],
        },
        "categories": category_rows(job),
        "opens_on_text": job.kind == Kind.GENERATE or _first_tab(job) == "samples",
        "places": job_places(job),
        "pictures": job_pictures(job, budget_bytes=budget_bytes(job)),
        **ranks_context(job),
    }
    return render(request, "jobs/job.html", context)


@require_GET
@login_required
def job_ranks(request: HttpRequest, job_id: str) -> HttpResponse:
    """The table of the job's devices, fetched again while it runs."""
    job = _get(request, job_id)
    return render(request, "jobs/ranks.html", {"job": job, **ranks_context(job)})


def ranks_context(job: Job) -> dict[str, Any]:
    """Values of the table of the job's devices; no rows for a job of one."""
    plan = job.plan or {}
    return {
        "ranks": rank_rows(job),
        "layout_words": layout_words(plan),
        "devices_differ": devices_differ(plan),
        "steps_alone": steps_alone(plan),
        "budget_bytes": budget_bytes(job),
    }


@require_GET
@login_required
def job_head(request: HttpRequest, job_id: str) -> HttpResponse:
    return render(request, "jobs/head.html", _head_context(request, _get(request, job_id)))


@require_GET
@login_required
def job_tab(request: HttpRequest, job_id: str, tab: str) -> HttpResponse:
    if tab not in TABS:
        raise Http404
    if not request.htmx:  # type: ignore[attr-defined]
        return redirect(f"/jobs/{job_id}/?tab={tab}")
    return render(request, "jobs/tab.html", _tab_context(request, _get(request, job_id), tab))


@require_GET
@login_required
def job_log(request: HttpRequest, job_id: str) -> HttpResponse:
    """Lines logged since ``?attempt=&end=``: lines, and the next question while there may be more."""
    job = _get(request, job_id)
    attempt, end_bytes = (_whole(request.GET.get(name, "")) for name in ("attempt", "end"))
    part = log_after(job, attempt=attempt, end_bytes=end_bytes)
    context = {"job": job, "part": part, "is_new_attempt": part.attempt > attempt, "goes_on": not job.is_terminal or part.text}
    return render(request, "jobs/log_part.html", context)


@require_GET
@login_required
def job_table(request: HttpRequest, job_id: str, chart: str) -> HttpResponse:
    """The rows behind a chart: a fragment inside the page, a page of its own without JavaScript."""
    job = _get(request, job_id)
    if chart not in CHARTS:
        raise Http404
    fragment = bool(request.htmx)  # type: ignore[attr-defined]
    context = {
        "job": job,
        "table": build_table(job, chart).newest(),
        "fragment": fragment,
        "page_base": "fragment.html" if fragment else "base.html",
    }
    return render(request, "jobs/table.html", context)


@require_GET
@login_required
def job_csv(request: HttpRequest, job_id: str, chart: str) -> HttpResponse:
    job = _get(request, job_id)
    if chart not in CHARTS:
        raise Http404
    answer = HttpResponse(build_table(job, chart).to_csv(), content_type="text/csv; charset=utf-8")
    answer["Content-Disposition"] = f'attachment; filename="{job.pk}-{chart}.csv"'
    return answer


@require_POST
@login_required
def job_cancel(request: HttpRequest, job_id: str) -> HttpResponse:
    modes: dict[str, CancelMode] = {"save": "save", "keep": "keep"}
    mode = modes.get(request.POST.get("mode", ""), "discard")
    return _act(request, job_id, lambda job, actor: cancel_job(job, mode=mode, actor=actor), undo=_UNDO_STOP)


@require_POST
@login_required
def job_pause(request: HttpRequest, job_id: str) -> HttpResponse:
    return _act(request, job_id, lambda job, actor: pause_job(job, actor=actor), undo=_UNDO_PAUSE)


@require_POST
@login_required
def job_resume(request: HttpRequest, job_id: str) -> HttpResponse:
    return _act(request, job_id, lambda job, actor: resume_job(job, actor=actor), undo=_UNDO_RESUME)


@require_POST
@login_required
def job_retry(request: HttpRequest, job_id: str) -> HttpResponse:
    """A retry is a new job; the page goes to it."""
    return _act(request, job_id, lambda job, actor: retry_job(job, actor=actor, owner=request.user))


@require_POST
@login_required
def job_export(request: HttpRequest, job_id: str) -> HttpResponse:
    """Write the weights of a checkpoint, by a job of its own; the page goes to it."""
    job = _get(request, job_id)
    gguf = request.POST.get("gguf", "none")
    try:
        export = read_export(job, {"gguf": gguf} if gguf != "none" else {})
        step = _whole(request.POST.get("step", "")) or None
        made = export_job(job, step=step, export=export, actor=f"user:{request.user.get_username()}", owner=request.user)
    except HeadroomError as error:
        messages.error(request, f"{error.message[:1].upper()}{error.message[1:]}. {error.hint}".strip())
        return redirect(f"{reverse('job', args=[job.pk])}?tab=checkpoints")
    return redirect("job", made.pk)


@require_POST
@login_required
def job_model(request: HttpRequest, job_id: str) -> HttpResponse:
    """Make it a model; the page goes to that one, also when the button was pressed twice."""
    job = _get(request, job_id)
    try:
        model = create_trained_model(job)
    except ModelExists as error:
        return redirect("model", error.fields["model_id"])
    except HeadroomError as error:
        messages.error(request, f"{error.message[:1].upper()}{error.message[1:]}. {error.hint}".strip())
        return redirect("job", job.pk)
    note_target(request, model.pk, detail=model.name)
    messages.success(request, f"{model.name} is a model now.")
    return redirect("model", model.pk)


@dataclass(frozen=True, kw_only=True)
class _Undo:
    """The link that undoes an action, shown beside the word that it was done."""

    done: str
    label: str
    view: str
    only_from: State | None = None
    """Given only where the job was in this state; of a job at work it has gone too far."""


_UNDO_STOP = _Undo(
    done="Stopped before it began.", label="Put it back in the queue", view="job_retry", only_from=State.QUEUED
)
_UNDO_PAUSE = _Undo(done="Paused.", label="Undo", view="job_resume")
_UNDO_RESUME = _Undo(done="Resumed.", label="Undo", view="job_pause")


def _act(
    request: HttpRequest, job_id: str, act: Callable[[Job, str], object], *, undo: _Undo | None = None
) -> HttpResponse:
    job = _get(request, job_id)
    before = job.state
    try:
        result = act(job, f"user:{request.user.get_username()}")
    except HeadroomError as error:
        messages.error(request, f"{error.message}. {error.hint}")
        return redirect("job", job.pk)
    if undo is not None and undo.only_from in (None, before):
        context = {"undo": undo, "url": reverse(undo.view, args=[job.pk])}
        messages.success(request, render_to_string("jobs/undo.html", context, request=request))
    return redirect("job", result.pk if isinstance(result, Job) else job.pk)


def _get(request: HttpRequest, job_id: str) -> Job:
    return get_object_or_404(jobs_visible_to(request.user).select_related("model", "dataset", "machine"), pk=job_id)


def _head_context(request: HttpRequest, job: Job) -> dict[str, Any]:
    last_step = job.checkpoints.order_by("-step").values_list("step", flat=True).first()
    return {
        "job": job,
        "view": describe_job(job, last_checkpoint_step=last_step, shows_queue=True),
        **(_left_context(request, job) if job.is_terminal else {}),
        "api_url": f"/api/v1/jobs/{job.pk}",
        "shared_url": request.build_absolute_uri(path) if (path := shared_path(job)) else "",
        "copies": copies_of(job.spec, url=request.build_absolute_uri("/").rstrip("/"), names=_names(request, job)),
    }


def _names(request: HttpRequest, job: Job) -> dict[str, str]:
    """Names of the job's model and data, each only where it means the same row to who reads the page."""
    rows: tuple[tuple[str, Model | Dataset | None, QuerySet[Any]], ...] = (
        ("model", job.model, models_visible_to(request.user)),
        ("prompts" if job.kind == Kind.GENERATE else "dataset", job.dataset, datasets_visible_to(request.user)),
    )
    return {field: row.name for field, row, visible in rows if row and field in job.spec and _means(row, field, visible)}


def _means(row: Model | Dataset, field: str, visible: QuerySet[Any]) -> bool:
    try:
        return bool(find_visible(visible, row.name, field=field) == row)
    except InvalidInput:
        return False


def _left_context(request: HttpRequest, job: Job) -> dict[str, Any]:
    """The model that an ended run's weights can become, or have become."""
    return {
        "left": what_is_left(job),
        "became": models_visible_to(request.user).filter(from_job_id=job.pk).first(),
        "whole_url": edit_url(job, export_adapter="both"),
    }


def job_places(job: Job) -> PlacePicture | None:
    return places_of(job.plan, num_blocks=read_model_spec(job.model.config).num_blocks) if job.plan else None


def _first_tab(job: Job) -> str:
    """Answers and samples come first where there are some."""
    is_sampled = job.kind == Kind.TRAIN and job.is_terminal and job.artifacts.filter(kind="sample").exists()
    return "samples" if job.kind == Kind.GENERATE or is_sampled else TABS[0]


def _whole(text: str) -> int:
    """A number from an address; 0 for what is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0


def _tab_context(request: HttpRequest, job: Job, tab: str) -> dict[str, Any]:
    return {
        "job": job,
        "tab": tab,
        "tabs": TABS,
        "tab_template": f"jobs/tab_{tab}.html",
        "api_url": f"/api/v1/jobs/{job.pk}",
        **(_logs_tab(job, request.GET.get("q", "")) if tab == "logs" else _TAB_CONTENTS[tab](job)),
    }


def plan_facts(job: Job) -> dict[str, Any]:
    attempt = job.attempts.exclude(measured=None).order_by("-number").first()
    measured = attempt.measured if attempt else _measured_so_far(job)
    goal = job.spec.get("goal", {})
    return {
        "attempts": attempt_rows(job),
        "was_shared": attempt is not None and attempt.is_shared,
        "rows": plan_rows(job.plan, prediction=job.prediction, measured=measured),
        "comparisons": comparisons(job.prediction, measured=measured, has_ended=job.is_terminal),
        "explanation": _explanation(job),
        "work_pairs": [
            (name, setting_words(value)) for name, value in job.spec.get("workload", {}).items() if value not in ("", None)
        ],
        "goal_pairs": [(_goal_name(name), _goal_value(name, value)) for name, value in goal.items() if value not in ("", None)],
    }


def attempt_rows(job: Job) -> list[dict[str, Any]]:
    """The line of attempts, where there is more than one or one that ran out of memory."""
    rows = attempt_documents(job.attempts.select_related("job").prefetch_related("members"))
    if job.kind != Kind.TRAIN or (len(rows) < 2 and not any(row["cause"] for row in rows)):
        return []
    return [
        {
            **row,
            "plan_name": plan_name(row["plan"]) if row["plan"] else "",
            "end": NAMES.get(row["outcome"], row["outcome"].replace("_", " ")) if row["outcome"] else "under way",
        }
        for row in rows
    ]


def _explanation(job: Job) -> list[str]:
    if job.plan is None or job.prediction is None:
        return []
    if job.kind == Kind.GENERATE:
        prediction = GenerationPrediction.from_json(job.prediction)
        try:
            workload = generation_workload(spec_of_job(job))
        except HeadroomError:
            return []  # Its model or prompts cannot be read any more, which may be why it failed; the head says so.
        return list(explain_generation_plan(GenerationPlan.from_json(job.plan), workload=workload, prediction=prediction))
    return explain_plan(Plan.from_json(job.plan), prediction=Prediction.from_json(job.prediction))


def _measured_so_far(job: Job) -> dict[str, Any]:
    """Values that the record will hold, from the highest sample while the job runs."""
    samples = job.samples.filter(kind__in=("step", "generate")).order_by(F("peak_bytes").desc(nulls_last=True))
    # the index alone finds the record; only then is the one record read, since parsing all of a long run's takes a quarter second
    highest = job.samples.filter(pk=samples.values("pk")[:1]).values_list("data", flat=True).first() or {}
    return {
        "device_peak_bytes": highest.get("device_peak_bytes"),
        "device_bytes_by_category": highest.get("device_bytes"),
        **{name: job.summary.get(name) for name in ("step_ms", "prefill_ms", "decode_ms")},
    }


def _checkpoints_tab(job: Job) -> dict[str, Any]:
    """The newest are on the disk still; each with the form that goes on from it."""
    rows = [
        {"checkpoint": row, "is_there": is_there(row), "branch_url": edit_url(job, resume_from=f"{job.pk}:{row.step}")}
        for row in job.checkpoints.all()
    ]
    return {"checkpoints": rows, "exports": exports_of(job), "has_gguf": job.model.model_type in GGUF_ARCHITECTURES}


def _samples_tab(job: Job) -> dict[str, Any]:
    found = job.artifacts.filter(kind="sample")
    answers = newest_answers(job) if job.kind == Kind.GENERATE else []
    return {"texts": [{"title": artifact.name, "body": sample_text(artifact)} for artifact in found], "answers": answers}


def _logs_tab(job: Job, wanted: str) -> dict[str, Any]:
    if not wanted.strip():
        return {"part": log_tail(job), "goes_on": not job.is_terminal}
    found, num_found = find_in_log(job, wanted.strip())
    return {"wanted": wanted, "found": found, "num_found": num_found}


def _events_tab(job: Job) -> dict[str, Any]:
    return {"events": job.events.order_by("-seq")}


def _files_tab(job: Job) -> dict[str, Any]:
    return {"artifacts": job.artifacts.all()}


_TAB_CONTENTS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "plan": plan_facts,
    "execution": lambda job: {},
    "checkpoints": _checkpoints_tab,
    "samples": _samples_tab,
    "events": _events_tab,
    "files": _files_tab,
}


def category_rows(job: Job) -> list[dict[str, Any]]:
    """Those that the prediction has, or all of them without one; keys and values only where there are any."""
    predicted = (job.prediction or {}).get("device_bytes_by_category") or {}
    left_out = {"kv_cache"} if job.kind != Kind.GENERATE and not predicted.get("kv_cache") else set()
    return [
        {"key": category, "label": CATEGORY_LABELS[category], "predicted_bytes": predicted.get(category)}
        for category in CATEGORIES
        if (not predicted or category in predicted) and category not in left_out
    ]


def _goal_name(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def _goal_value(name: str, value: Any) -> str:
    if name.endswith("_bytes") and value is not None:
        return format_bytes(value)
    if isinstance(value, dict):
        pinned = [(path, set_to) for path, set_to in flat_pins(value) if set_to is not None]
        return ", ".join(f"{path} {_goal_value(path, set_to)}" for path, set_to in pinned) or "none"
    return setting_words(value)
