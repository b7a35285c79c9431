"""The form for a new generate job, priced beside it as ``training.py`` does for training."""

from typing import Any

from django.contrib.auth.decorators import login_required
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, QueryDict
from django.views.decorators.http import require_http_methods, require_POST

from optimizer.base.errors import HeadroomError
from webapp.accounts.audit import note_target
from webapp.catalog.actions import create_dataset
from webapp.catalog.models import Model
from webapp.catalog.queries import datasets_visible_to, models_visible_to
from webapp.jobs.models import Kind
from webapp.pages.forms.generation import GenerateForm, PromptsUploadForm, initial_from_generate_spec
from webapp.pages.forms.work import WorkForm
from webapp.pages.views.catalog import refuse_upload
from webapp.pages.views.new.work import FormPage, answer_form, answer_price, answer_upload, has_errors

SAMPLING = ("temperature", "top_k", "top_p", "seed", "stop")


def _models(request: HttpRequest) -> QuerySet[Model]:
    return models_visible_to(request.user).filter(has_weights=True)


def make_generate_form(request: HttpRequest, data: QueryDict | None, initial: dict[str, Any]) -> GenerateForm:
    return GenerateForm(
        data,
        initial=initial,
        models=_models(request),
        prompts=datasets_visible_to(request.user).filter(format="prompts"),
    )


def _describe(form: WorkForm) -> dict[str, Any]:
    return {
        "prompts_upload": PromptsUploadForm(auto_id="prompts_upload_%s"),
        "sampling": [form[name] for name in SAMPLING],
        "sampling_open": has_errors(form, SAMPLING),
    }


PAGE = FormPage(
    kind=Kind.GENERATE,
    template="jobs/generate.html",
    address="generate_new",
    price_address="generate_price",
    make_form=make_generate_form,
    initial_from_spec=initial_from_generate_spec,
    models=_models,
    describe=_describe,
)


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def new_generate(request: HttpRequest) -> HttpResponse:
    return answer_form(request, PAGE)


@require_POST
@login_required
def price_generate(request: HttpRequest) -> HttpResponse:
    return answer_price(request, PAGE)


@require_POST
@login_required
def upload_prompts_here(request: HttpRequest) -> HttpResponse:
    return answer_upload(
        request, PAGE, field="prompts", make_upload=PromptsUploadForm, upload=_upload, template="jobs/new_prompts.html"
    )


def _upload(request: HttpRequest, upload: PromptsUploadForm) -> str:
    data = upload.cleaned_data
    try:
        dataset = create_dataset(owner=request.user, name=data["name"], file=data["file"], purpose="prompts")  # type: ignore[arg-type]
    except HeadroomError as error:
        return refuse_upload(upload, error, fallback=upload.fallback_field)
    note_target(request, dataset.pk, detail=dataset.name)
    return dataset.pk
