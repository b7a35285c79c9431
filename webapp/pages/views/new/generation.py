"""The form for a new generate job, priced beside it as ``training.py`` does for training."""

from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_http_methods, require_POST

from optimizer.base.errors import HeadroomError
from webapp.accounts.audit import note_target
from webapp.catalog.actions import create_dataset
from webapp.jobs.specs.recipes import RECIPES
from webapp.pages.forms.generation import PromptsUploadForm
from webapp.pages.forms.kinds import GENERATION
from webapp.pages.forms.work import WorkForm
from webapp.pages.views.catalog import refuse_upload
from webapp.pages.views.new.work import FormPage, answer_form, answer_price, answer_upload, has_errors

NUMBERS = ("model", "prompts", "max_new_tokens", "num_devices", "device_budget")
"""Fields in sight; an error in any other opens the rest."""
SAMPLING = ("temperature", "top_k", "top_p", "seed", "stop")


def _describe(form: WorkForm) -> dict[str, Any]:
    return {
        "prompts_upload": PromptsUploadForm(auto_id="prompts_upload_%s"),
        "recipes": RECIPES.values(),
        "advanced_open": form.is_bound and any(name not in NUMBERS for name in form.errors),
        "sampling": [form[name] for name in SAMPLING],
        "sampling_open": has_errors(form, SAMPLING),
    }


PAGE = FormPage(
    form=GENERATION,
    template="jobs/generate.html",
    price_address="generate_price",
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
