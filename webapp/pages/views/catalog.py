"""Models and datasets: what jobs are made of."""

from django import forms
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods

from optimizer.errors import HeadroomError
from webapp.accounts.audit import note_target
from webapp.catalog.actions import create_dataset, create_model
from webapp.catalog.queries import datasets_visible_to, models_visible_to, profile_states
from webapp.pages.forms import DatasetUploadForm, ModelUploadForm


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def model_list(request: HttpRequest) -> HttpResponse:
    form = ModelUploadForm(request.POST or None, request.FILES or None)
    if request.method == "POST" and form.is_valid() and upload_model(request, form):
        messages.success(request, f"Model {form.cleaned_data['name']} is ready to use.")
        return redirect("models")
    models = list(models_visible_to(request.user))
    states = profile_states(models)
    rows = [{"model": model, "profile": states[model.fingerprint]} for model in models]
    return render(request, "catalog/models.html", {"form": form, "rows": rows})


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def dataset_list(request: HttpRequest) -> HttpResponse:
    form = DatasetUploadForm(request.POST or None, request.FILES or None)
    if request.method == "POST" and form.is_valid() and upload_dataset(request, form):
        messages.success(request, f"Dataset {form.cleaned_data['name']} is ready to use.")
        return redirect("datasets")
    return render(request, "catalog/datasets.html", {"form": form, "datasets": datasets_visible_to(request.user)})


def upload_model(request: HttpRequest, form: ModelUploadForm) -> str:
    """The new model's id; empty, with the reason beside its field, when the files were refused."""
    data = form.cleaned_data
    try:
        model = create_model(
            owner=request.user,  # type: ignore[arg-type]
            name=data["name"],
            config=data["config"],
            tokenizer=data["tokenizer"],
            weights=data["weights"],
            tokenizer_config=data["tokenizer_config"],
        )
    except HeadroomError as error:
        return refuse_upload(form, error, fallback=form.fallback_field)
    note_target(request, model.pk, detail=model.name)
    return model.pk


def upload_dataset(request: HttpRequest, form: DatasetUploadForm) -> str:
    """The new dataset's id; empty, with the reason beside its field, when the file was refused."""
    try:
        dataset = create_dataset(owner=request.user, name=form.cleaned_data["name"], file=form.cleaned_data["file"])  # type: ignore[arg-type]
    except HeadroomError as error:
        return refuse_upload(form, error, fallback=form.fallback_field)
    note_target(request, dataset.pk, detail=dataset.name)
    return dataset.pk


def refuse_upload(form: forms.Form, error: HeadroomError, *, fallback: str) -> str:
    """Put the reason beside the field it names, or ``fallback``; the empty id."""
    named = str(error.fields.get("field", ""))
    form.add_error(named if named in form.fields else fallback, error.message)
    return ""
