"""Declares the form of each kind of work: how it is made, the models it offers, and what a finished spec fills it with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.db.models import QuerySet
from django.http import HttpRequest, QueryDict

from webapp.catalog.models import Model
from webapp.catalog.queries import datasets_visible_to, models_visible_to
from webapp.jobs.models import Kind
from webapp.pages.forms.generation import GenerateForm, initial_from_generate_spec
from webapp.pages.forms.training import JobForm, initial_from_spec
from webapp.pages.forms.work import WorkForm


@dataclass(frozen=True, kw_only=True)
class FormKind:
    """One kind of work's form."""

    kind: Kind
    address: str
    """Name of the page's address; a POST there starts a job."""
    make_form: Callable[[HttpRequest, QueryDict | None, dict[str, Any]], WorkForm]
    """From what was typed, or from what the fields begin with."""
    initial_from_spec: Callable[[dict[str, Any]], dict[str, Any]]
    models: Callable[[HttpRequest], QuerySet[Model]]


def first_model(rows: QuerySet[Model], user: Any) -> str | None:
    """The newest of one's own, else the smallest there is: the page prices it at once, and that should be quick."""
    own = rows.filter(owner=user).order_by("-pk").values_list("pk", flat=True).first()
    return own or rows.order_by("num_parameters").values_list("pk", flat=True).first()


def _make_job_form(request: HttpRequest, data: QueryDict | None, initial: dict[str, Any]) -> JobForm:
    return JobForm(
        data,
        initial=initial,
        models=models_visible_to(request.user),
        datasets=datasets_visible_to(request.user).exclude(format="prompts"),
    )


def _models_with_weights(request: HttpRequest) -> QuerySet[Model]:
    return models_visible_to(request.user).filter(has_weights=True)


def _make_generate_form(request: HttpRequest, data: QueryDict | None, initial: dict[str, Any]) -> GenerateForm:
    return GenerateForm(
        data,
        initial=initial,
        models=_models_with_weights(request),
        prompts=datasets_visible_to(request.user).filter(format="prompts"),
    )


TRAINING = FormKind(
    kind=Kind.TRAIN,
    address="job_new",
    make_form=_make_job_form,
    initial_from_spec=initial_from_spec,
    models=lambda request: models_visible_to(request.user),
)
GENERATION = FormKind(
    kind=Kind.GENERATE,
    address="generate_new",
    make_form=_make_generate_form,
    initial_from_spec=initial_from_generate_spec,
    models=_models_with_weights,
)
