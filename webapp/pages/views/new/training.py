"""The form for a new training job: each edit is priced again beside it, and nothing that was typed is lost.

The verdict comes from the same calls as the API's ``POST /plans`` and ``POST /jobs``.
"""

from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_http_methods, require_POST

from webapp.catalog.bundled import example_spec
from webapp.pages.forms.intents import list_intents
from webapp.pages.forms.kinds import TRAINING
from webapp.pages.forms.training import ADVANCED_FIELDS, DatasetUploadForm, ModelUploadForm
from webapp.pages.forms.work import WorkForm
from webapp.pages.views.catalog import upload_dataset, upload_model
from webapp.pages.views.new.work import FormPage, answer_form, answer_price, answer_upload, has_errors

ADVANCED = (
    *("num_devices", "machines", "link"),
    *ADVANCED_FIELDS,
    "export_dtype",
    "export_gguf",
    "resume_from",
)
NUMBERS = ("model", "dataset", "num_steps", "sequence_length", "global_batch_size", "learning_rate", "device_budget")
"""Fields in sight; an error in any other opens the rest."""
ADAPTERS = ("rank", "alpha", "dropout", "targets", "export_adapter")


def _describe(form: WorkForm) -> dict[str, Any]:
    return {
        "model_upload": ModelUploadForm(auto_id="model_upload_%s"),
        "dataset_upload": DatasetUploadForm(auto_id="dataset_upload_%s"),
        "intents": list_intents(form),
        "advanced": [form[name] for name in ADVANCED if name in form.fields],
        "advanced_open": form.is_bound and any(name not in NUMBERS for name in form.errors),
        "adapters": [form[name] for name in ADAPTERS],
        "adapters_open": bool(form["use_adapters"].value()) or has_errors(form, ADAPTERS),
    }


PAGE = FormPage(
    form=TRAINING,
    template="jobs/new.html",
    price_address="job_price",
    describe=_describe,
    example=example_spec,
)


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def new_job(request: HttpRequest) -> HttpResponse:
    return answer_form(request, PAGE)


@require_POST
@login_required
def price(request: HttpRequest) -> HttpResponse:
    return answer_price(request, PAGE)


@require_POST
@login_required
def upload_model_here(request: HttpRequest) -> HttpResponse:
    return answer_upload(
        request, PAGE, field="model", make_upload=ModelUploadForm, upload=upload_model, template="jobs/new_model.html"
    )


@require_POST
@login_required
def upload_dataset_here(request: HttpRequest) -> HttpResponse:
    return answer_upload(
        request, PAGE, field="dataset", make_upload=DatasetUploadForm, upload=upload_dataset, template="jobs/new_dataset.html"
    )
