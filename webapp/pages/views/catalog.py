"""Models and datasets: what jobs are made of."""

from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from optimizer.base.errors import HeadroomError
from optimizer.models.spec import read_model_spec
from optimizer.models.structure import describe_structure
from webapp.accounts.audit import note_target
from webapp.catalog.actions import correct_columns, create_dataset, create_model, files_bytes, read_again
from webapp.catalog.distinct_names import distinct_names
from webapp.catalog.files.model_parts import as_sidecars
from webapp.catalog.hub.download import begin_download, list_downloads
from webapp.catalog.linked import link_model
from webapp.catalog.models import Dataset, Model
from webapp.catalog.preview import preview_samples
from webapp.catalog.queries import (
    datasets_visible_to,
    deleted_datasets_visible_to,
    deleted_models_visible_to,
    models_visible_to,
    profile_states,
)
from webapp.catalog.removal import delete_row, restore_row
from webapp.catalog.server_data import create_dataset_of_path
from webapp.jobs.queries import jobs_visible_to, latest_jobs_visible_to
from webapp.pages.forms.training import DatasetUploadForm, ModelUploadForm
from webapp.pages.words.catalog import columns_words, fold_cards, length_facts, structure_rows, unusable_lines
from webapp.planning.reach import ask_for_needs, read_cards, read_needs

PREVIEW_LENGTH = 512
"""Tokens in a row, until another number is chosen."""
SHOWN_JOBS = 10
"""That used a model or dataset, the newest."""


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def model_list(request: HttpRequest) -> HttpResponse:
    form = ModelUploadForm(request.POST or None, request.FILES or None)
    if request.method == "POST" and form.is_valid() and form.cleaned_data.get("hub"):
        if fetch_model(request, form):
            return redirect("models")
    elif request.method == "POST" and form.is_valid() and upload_model(request, form):
        messages.success(request, f"Model {form.cleaned_data['name']} is ready to use.")
        return redirect("models")
    models = list(models_visible_to(request.user))
    states = profile_states(models)
    rows = [{"model": model, "profile": states[model.fingerprint]} for model in models]
    deleted = deleted_models_visible_to(request.user).filter(pk=request.GET.get("deleted", "")).first()
    context = {"form": form, "rows": rows, "deleted": deleted, "downloads": list_downloads(request.user)}
    return render(request, "catalog/models.html", context)


@require_GET
@login_required
def model_page(request: HttpRequest, model_id: str) -> HttpResponse:
    model = get_object_or_404(models_visible_to(request.user), pk=model_id)
    structure = describe_structure(read_model_spec(model.config))
    context = {
        "model": model,
        "profile": profile_states([model])[model.fingerprint],
        "structure": structure,
        "stacks": structure_rows(structure),
        "files_bytes": files_bytes(model),
        "made_by": jobs_visible_to(request.user).filter(pk=model.from_job_id).first() if model.from_job_id else None,
        "jobs": latest_jobs_visible_to(request.user, most=SHOWN_JOBS, model=model),
    }
    return render(request, "catalog/model.html", context)


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def model_cards(request: HttpRequest, model_id: str) -> HttpResponse:
    """On which cards it runs: a part of its page, a page of its own without JavaScript. POST asks for what is not known yet."""
    model = get_object_or_404(models_visible_to(request.user), pk=model_id)
    if request.method == "POST":
        ask_for_needs(model)
        return redirect("model_cards", model.pk)
    needs = read_needs(model)
    fragment = bool(request.htmx)  # type: ignore[attr-defined]
    context = {
        "model": model,
        "needs": needs,
        "cards": fold_cards(read_cards(needs)),
        "is_pending": any(need.state == "pending" for need in needs),
        "is_known": any(need.state == "ready" for need in needs),
        "can_ask": any(need.state == "not_asked" for need in needs),
        "fragment": fragment,
        "page_base": "fragment.html" if fragment else "base.html",
    }
    return render(request, "catalog/model_cards.html", context)


@require_POST
@login_required
def model_delete(request: HttpRequest, model_id: str) -> HttpResponse:
    return _delete(request, get_object_or_404(models_visible_to(request.user), pk=model_id), to="models")


@require_POST
@login_required
def model_restore(request: HttpRequest, model_id: str) -> HttpResponse:
    row = get_object_or_404(deleted_models_visible_to(request.user), pk=model_id)
    return _restore(request, row, to="model", otherwise="models")


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def dataset_list(request: HttpRequest) -> HttpResponse:
    form = DatasetUploadForm(request.POST or None, request.FILES or None)
    if request.method == "POST" and form.is_valid() and upload_dataset(request, form):
        messages.success(request, f"Dataset {form.cleaned_data['name']} is ready to use.")
        return redirect("datasets")
    deleted = deleted_datasets_visible_to(request.user).filter(pk=request.GET.get("deleted", "")).first()
    context = {"form": form, "datasets": datasets_visible_to(request.user), "deleted": deleted}
    return render(request, "catalog/datasets.html", context)


@require_GET
@login_required
def dataset_page(request: HttpRequest, dataset_id: str) -> HttpResponse:
    dataset = get_object_or_404(datasets_visible_to(request.user), pk=dataset_id)
    context = {
        "dataset": dataset,
        "records": dataset.facts.get("records") or [],
        "lengths": length_facts(dataset),
        "columns": columns_words(dataset),
        "unusable": unusable_lines(dataset),
        "said": bool(dataset.columns),
        "jobs": latest_jobs_visible_to(request.user, most=SHOWN_JOBS, dataset=dataset),
    }
    return render(request, "catalog/dataset.html", context)


@require_GET
@login_required
def dataset_preview(request: HttpRequest, dataset_id: str) -> HttpResponse:
    """Samples with the parts that training learns: a part of the dataset's page, a page of its own without JavaScript."""
    dataset = get_object_or_404(datasets_visible_to(request.user), pk=dataset_id)
    models = list(models_visible_to(request.user).select_related("project").order_by("name"))
    asked = request.GET.get("model", "")
    model = next((each for each in models if asked in (each.pk, each.name)), None) or _chat_model_first(models)
    fragment = bool(request.htmx)  # type: ignore[attr-defined]
    context = {
        "dataset": dataset,
        "models": distinct_names(models).items(),
        "model": model,
        "sequence_length": request.GET.get("sequence_length", str(PREVIEW_LENGTH)),
        "loss_on": "all" if request.GET.get("loss_on") == "all" else "assistant",
        "fragment": fragment,
        "page_base": "fragment.html" if fragment else "base.html",
    }
    if model is not None:
        context |= _preview(dataset, model, length=str(context["sequence_length"]), loss_on=str(context["loss_on"]))
    return render(request, "catalog/dataset_preview.html", context)


def _chat_model_first(models: list[Model]) -> Model | None:
    return next((model for model in models if model.has_chat), models[0] if models else None)


def _preview(dataset: Dataset, model: Model, *, length: str, loss_on: str) -> dict[str, Any]:
    """The part of the page's context that was read from the file, or the sentence that says why not."""
    if not length.isdecimal():
        return {"refusal": f"The row length is {length!r:.20}; give a whole number of tokens."}
    try:
        found = preview_samples(dataset, model, sequence_length=int(length), loss_on="all" if loss_on == "all" else "assistant")
    except HeadroomError as error:
        return {"refusal": f"{error.message}. {error.hint}".strip()}
    learnt_percent = round(100 * found["learnt_share"])
    return {"preview": found, "learnt_percent": learnt_percent, "padded_rows": found["num_samples"] - found["num_left_out"]}


@require_POST
@login_required
def dataset_read(request: HttpRequest, dataset_id: str) -> HttpResponse:
    """Look into the file again: what was uploaded to an earlier version has no lengths."""
    dataset = get_object_or_404(datasets_visible_to(request.user), pk=dataset_id)
    try:
        read_again(dataset)
    except HeadroomError as error:
        messages.error(request, f"{error.message}. {error.hint}".strip())
    return redirect("dataset", dataset.pk)


@require_POST
@login_required
def dataset_columns(request: HttpRequest, dataset_id: str) -> HttpResponse:
    """Say which column holds what, or have it found again."""
    dataset = get_object_or_404(datasets_visible_to(request.user), pk=dataset_id)
    try:
        correct_columns(dataset, request.POST.get("columns", ""))
    except HeadroomError as error:
        messages.error(request, f"{error.message}. {error.hint}".strip())
    else:
        messages.success(request, f"{dataset.name} is read as: {columns_words(dataset) or 'a text'}.")
    return redirect("dataset", dataset.pk)


@require_POST
@login_required
def dataset_delete(request: HttpRequest, dataset_id: str) -> HttpResponse:
    return _delete(request, get_object_or_404(datasets_visible_to(request.user), pk=dataset_id), to="datasets")


@require_POST
@login_required
def dataset_restore(request: HttpRequest, dataset_id: str) -> HttpResponse:
    row = get_object_or_404(deleted_datasets_visible_to(request.user), pk=dataset_id)
    return _restore(request, row, to="dataset", otherwise="datasets")


def upload_model(request: HttpRequest, form: ModelUploadForm) -> str:
    """The new model's id; empty, with the reason beside its field, when the files were refused."""
    data = form.cleaned_data
    try:
        model = _make_model(request.user, data)
    except HeadroomError as error:
        return refuse_upload(form, error, fallback=form.fallback_field)
    note_target(request, model.pk, detail=model.name)
    return model.pk


def fetch_model(request: HttpRequest, form: ModelUploadForm) -> str:
    """The id of a download from the hub; empty, with the reason beside its field, when it was refused."""
    data = form.cleaned_data
    try:
        upload = begin_download(owner=request.user, name=data["name"], reference=data["hub"])  # type: ignore[arg-type]
    except HeadroomError as error:
        return refuse_upload(form, error, fallback="hub")
    note_target(request, upload.pk, detail=upload.source["hub"])
    return upload.pk


def _make_model(user: Any, data: dict[str, Any]) -> Model:
    if data.get("path"):
        return link_model(owner=user, name=data["name"], path=data["path"])
    return create_model(
        owner=user,
        name=data["name"],
        config=data["config"],
        tokenizer=data["tokenizer"],
        weights=data["weights"],
        tokenizer_config=data["tokenizer_config"],
        sidecars=as_sidecars(data["others"]),
    )


def upload_dataset(request: HttpRequest, form: DatasetUploadForm) -> str:
    """The new dataset's id; empty, with the reason beside its field, when the file was refused."""
    try:
        dataset = _make_dataset(request.user, form.cleaned_data)
    except HeadroomError as error:
        return refuse_upload(form, error, fallback=form.fallback_field)
    note_target(request, dataset.pk, detail=dataset.name)
    return dataset.pk


def _make_dataset(user: Any, data: dict[str, Any]) -> Dataset:
    if data.get("path"):
        return create_dataset_of_path(owner=user, name=data["name"], path=data["path"], columns=data["columns"])
    return create_dataset(owner=user, name=data["name"], file=data["file"], columns=data["columns"])


def refuse_upload(form: forms.Form, error: HeadroomError, *, fallback: str) -> str:
    """Put the reason beside the field it names, or ``fallback``; the empty id."""
    named = str(error.fields.get("field", ""))
    form.add_error(named if named in form.fields else fallback, error.message)
    return ""


def _delete(request: HttpRequest, row: Model | Dataset, *, to: str) -> HttpResponse:
    """At once; the list then offers to undo it."""
    try:
        delete_row(row)
    except HeadroomError as error:
        messages.error(request, f"{error.message}. {error.hint}".strip())
        return redirect(to)
    return redirect(f"{reverse(to)}?deleted={row.pk}")


def _restore(request: HttpRequest, row: Model | Dataset, *, to: str, otherwise: str) -> HttpResponse:
    try:
        restore_row(row)
    except HeadroomError as error:
        messages.error(request, f"{error.message}. {error.hint}".strip())
        return redirect(otherwise)
    return redirect(to, row.pk)
