"""The form for a new job: each edit is priced again beside it, and nothing that was typed is lost.

The verdict comes from the same calls as the API's ``POST /plans`` and ``POST /jobs``.
"""

from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST

from optimizer.errors import HeadroomError
from webapp.catalog.models import Model
from webapp.catalog.queries import datasets_visible_to, models_visible_to
from webapp.jobs.planning import submit_job
from webapp.jobs.queries import jobs_visible_to, offers_visible_to
from webapp.pages.forms import DatasetUploadForm, JobForm, ModelUploadForm, initial_from_spec
from webapp.pages.pricing import Pricing, price_for_page
from webapp.pages.views.catalog import upload_dataset, upload_model

ADVANCED = (
    "optimizer",
    "momentum",
    "weight_decay",
    "max_grad_norm",
    "seed",
    "eval_every_steps",
    "eval_batches",
    "checkpoint_every_steps",
    "sample_tokens",
    "export_dtype",
)
ADAPTERS = ("rank", "alpha", "dropout", "targets", "export_adapter")


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def new_job(request: HttpRequest) -> HttpResponse:
    """The form, prefilled from ``?from=<job>``, ``?model=`` or ``?dataset=``; a POST starts the job."""
    if request.method != "POST":
        return _page(request, _form(request, None), Pricing(kind="incomplete", problems=("Not priced yet.",)))
    form = _form(request, request.POST)
    if not form.is_valid():
        return _page(request, form, incomplete(form))
    spec = form.spec()
    try:
        job = submit_job(
            request.user,
            spec=spec,
            plan_id=request.POST.get("plan_id") or None,
            override=bool(request.POST.get("override")),
            actor=f"user:{request.user.get_username()}",
        )
    except HeadroomError as error:
        if form.put_error(error):
            return _page(request, form, incomplete(form))
        form.add_error(None, f"{error.message}. {error.hint}".strip())
        pricing, _ = price_for_page(request.user, spec, selected=selected_offer(request))
        return _page(request, form, pricing)
    return redirect("job", job.pk)


@require_POST
@login_required
def price(request: HttpRequest) -> HttpResponse:
    """The verdict, the plans and the errors for what stands in the form now; its fields are not sent back."""
    form = _form(request, request.POST)
    if not form.is_valid():
        return render(request, "jobs/price.html", {"form": form, "pricing": incomplete(form), "price_url": reverse("job_price")})
    pricing, problem = price_for_page(request.user, form.spec(), selected=selected_offer(request))
    if problem is not None and form.put_error(problem.error):
        pricing = incomplete(form)
    context = {"form": form, "pricing": pricing, "price_url": reverse("job_price")}
    return render(request, "jobs/price.html", context)


@require_POST
@login_required
def upload_model_here(request: HttpRequest) -> HttpResponse:
    """Upload beside the form: the answer is the model step again, the new model selected."""
    upload = ModelUploadForm(request.POST, request.FILES, auto_id="model_upload_%s")
    made = upload_model(request, upload) if upload.is_valid() else ""
    form = _form(request, None, initial={"model": made or request.POST.get("model")})
    shown = ModelUploadForm(auto_id="model_upload_%s") if made else upload
    return _uploaded(render(request, "jobs/new_model.html", {"form": form, "model_upload": shown}), made)


@require_POST
@login_required
def upload_dataset_here(request: HttpRequest) -> HttpResponse:
    """Upload beside the form: the answer is the data step again, the new dataset selected."""
    upload = DatasetUploadForm(request.POST, request.FILES, auto_id="dataset_upload_%s")
    made = upload_dataset(request, upload) if upload.is_valid() else ""
    form = _form(request, None, initial={"dataset": made or request.POST.get("dataset")})
    shown = DatasetUploadForm(auto_id="dataset_upload_%s") if made else upload
    return _uploaded(render(request, "jobs/new_dataset.html", {"form": form, "dataset_upload": shown}), made)


def _uploaded(answer: HttpResponse, made: str) -> HttpResponse:
    if made:
        answer["HX-Trigger-After-Settle"] = "uploaded"
    return answer


def _page(request: HttpRequest, form: JobForm, pricing: Pricing) -> HttpResponse:
    context = {
        "form": form,
        "pricing": pricing,
        "price_url": reverse("job_price"),
        "model_upload": ModelUploadForm(auto_id="model_upload_%s"),
        "dataset_upload": DatasetUploadForm(auto_id="dataset_upload_%s"),
        "advanced": [form[name] for name in ADVANCED],
        "advanced_errors": any(name in form.errors for name in ADVANCED) if form.is_bound else False,
        "adapters": [form[name] for name in ADAPTERS],
        "adapters_open": form["use_adapters"].value() or (form.is_bound and any(name in form.errors for name in ADAPTERS)),
    }
    return render(request, "jobs/new.html", context)


def _form(request: HttpRequest, data: QueryDict | None, *, initial: dict[str, Any] | None = None) -> JobForm:
    return JobForm(
        data,
        initial=initial if initial is not None else _initial(request),
        models=models_visible_to(request.user),
        datasets=datasets_visible_to(request.user).exclude(format="prompts"),
    )


def _initial(request: HttpRequest) -> dict[str, Any]:
    initial: dict[str, Any] = {"model": first_model(models_visible_to(request.user), request.user)}
    if source_id := request.GET.get("from", ""):
        source = jobs_visible_to(request.user).filter(pk=source_id).first()
        if source is None:
            messages.error(request, "The job to clone is not there; the form starts empty.")
        else:
            initial |= initial_from_spec(source.spec)
    return initial | {name: request.GET[name] for name in ("model", "dataset") if name in request.GET}


def first_model(rows: QuerySet[Model], user: Any) -> str | None:
    """The newest of one's own, else the smallest there is: the page prices it at once, and that should be quick."""
    own = rows.filter(owner=user).order_by("-pk").values_list("pk", flat=True).first()
    return own or rows.order_by("num_parameters").values_list("pk", flat=True).first()


def incomplete(form: forms.Form) -> Pricing:
    """The form's problems as a list; each stands beside its field as well."""
    problems = [
        f"{form.fields[name].label or name.replace('_', ' ').capitalize() if name in form.fields else ''}: {error}"
        for name, errors in form.errors.items()
        for error in errors
    ]
    return Pricing(kind="incomplete", problems=tuple(problems))


def selected_offer(request: HttpRequest) -> str:
    """``label@machine`` of the offer that was taken, so that it stays taken when prices are made anew."""
    plan_id = request.POST.get("plan_id", "")
    offer = offers_visible_to(request.user).filter(pk=plan_id).first() if plan_id.isprintable() else None
    return f"{offer.label}@{offer.machine_id}" if offer else ""
