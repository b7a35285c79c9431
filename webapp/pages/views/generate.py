"""The form for a new generate job, priced beside it as ``new_job.py`` does for training."""

from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST

from optimizer.errors import HeadroomError
from webapp.catalog.actions import create_dataset
from webapp.catalog.models import Dataset, Model
from webapp.catalog.queries import datasets_visible_to, models_visible_to
from webapp.jobs.models import Kind
from webapp.jobs.planning import submit_job
from webapp.jobs.queries import jobs_visible_to
from webapp.pages.generate_form import GenerateForm, PromptsUploadForm, initial_from_generate_spec
from webapp.pages.pricing import Pricing, price_for_page
from webapp.pages.views.catalog import refuse_upload
from webapp.pages.views.new_job import first_model, incomplete, selected_offer

SAMPLING = ("temperature", "top_k", "top_p", "seed", "stop")


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def new_generate(request: HttpRequest) -> HttpResponse:
    """The form, prefilled from ``?from=<job>``, ``?model=`` or ``?prompts=``; a POST starts the job."""
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
def price_generate(request: HttpRequest) -> HttpResponse:
    """The verdict, the plans and the errors for what stands in the form now; its fields are not sent back."""
    form = _form(request, request.POST)
    if form.is_valid():
        pricing, problem = price_for_page(request.user, form.spec(), selected=selected_offer(request))
        if problem is not None and form.put_error(problem.error):
            pricing = incomplete(form)
    else:
        pricing = incomplete(form)
    context = {"form": form, "pricing": pricing, "price_url": reverse("generate_price")}
    return render(request, "jobs/price.html", context)


@require_POST
@login_required
def upload_prompts_here(request: HttpRequest) -> HttpResponse:
    """Upload beside the form: the answer is the prompts' step again, the new ones selected."""
    upload = PromptsUploadForm(request.POST, request.FILES, auto_id="prompts_upload_%s")
    made = _upload(request, upload) if upload.is_valid() else ""
    form = _form(request, None, initial={"prompts": made or request.POST.get("prompts")})
    shown = PromptsUploadForm(auto_id="prompts_upload_%s") if made else upload
    answer = render(request, "jobs/new_prompts.html", {"form": form, "prompts_upload": shown})
    if made:
        answer["HX-Trigger-After-Settle"] = "uploaded"
    return answer


def _upload(request: HttpRequest, upload: PromptsUploadForm) -> str:
    data = upload.cleaned_data
    try:
        return create_dataset(owner=request.user, name=data["name"], file=data["file"], purpose="prompts").pk  # type: ignore[arg-type]
    except HeadroomError as error:
        return refuse_upload(upload, error, fallback=upload.fallback_field)


def _page(request: HttpRequest, form: GenerateForm, pricing: Pricing) -> HttpResponse:
    context = {
        "form": form,
        "pricing": pricing,
        "price_url": reverse("generate_price"),
        "prompts_upload": PromptsUploadForm(auto_id="prompts_upload_%s"),
        "sampling": [form[name] for name in SAMPLING],
        "sampling_errors": form.is_bound and any(name in form.errors for name in SAMPLING),
    }
    return render(request, "jobs/generate.html", context)


def _form(request: HttpRequest, data: QueryDict | None, *, initial: dict[str, Any] | None = None) -> GenerateForm:
    return GenerateForm(
        data,
        initial=initial if initial is not None else _initial(request),
        models=_models(request),
        prompts=_prompts(request),
    )


def _models(request: HttpRequest) -> QuerySet[Model]:
    return models_visible_to(request.user).filter(has_weights=True)


def _prompts(request: HttpRequest) -> QuerySet[Dataset]:
    return datasets_visible_to(request.user).filter(format="prompts")


def _initial(request: HttpRequest) -> dict[str, Any]:
    initial: dict[str, Any] = {"model": first_model(_models(request), request.user)}
    if source_id := request.GET.get("from", ""):
        source = jobs_visible_to(request.user).filter(pk=source_id, kind=Kind.GENERATE).first()
        if source is None:
            messages.error(request, "The job to clone is not there; the form starts empty.")
        else:
            initial |= initial_from_generate_spec(source.spec)
    return initial | {name: request.GET[name] for name in ("model", "prompts") if name in request.GET}
