"""Declares the form of each kind of work: how it is made, the models it offers, and what a finished spec fills it with."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.db.models import QuerySet
from django.http import HttpRequest, QueryDict

from optimizer.base.units import GIB, MIB
from webapp.catalog.models import Model
from webapp.catalog.queries import datasets_visible_to, machines_visible_to, models_visible_to, most_devices
from webapp.jobs.devices.room import largest_device
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
    """The newest of one's own, else the smallest there is, with weights before without: the page prices it at once."""
    own = rows.filter(owner=user).order_by("-pk").values_list("pk", flat=True).first()
    return own or rows.order_by("-has_weights", "num_parameters").values_list("pk", flat=True).first()


def usable_budget(user: Any) -> str:
    """Memory that one job can have on the machine that was heard of last, rounded down; empty while none is known."""
    machine = machines_visible_to(user).order_by("-last_seen_at").first()
    if machine is None:
        return ""
    memory_bytes = int(largest_device(machine)["memory_bytes"])
    unit_bytes, unit = (GIB, "GiB") if memory_bytes >= GIB else (MIB, "MiB")
    return f"{math.floor(10 * memory_bytes / unit_bytes) / 10:g} {unit}"


def _make_job_form(request: HttpRequest, data: QueryDict | None, initial: dict[str, Any]) -> JobForm:
    form = JobForm(
        data,
        initial=initial,
        models=models_visible_to(request.user).select_related("project"),
        datasets=datasets_visible_to(request.user).exclude(format="prompts").select_related("project"),
        most_devices=most_devices(request.user),
        num_machines=machines_visible_to(request.user).count(),
    )
    form.usable_budget = lambda: usable_budget(request.user)
    return form


def _models_with_weights(request: HttpRequest) -> QuerySet[Model]:
    return models_visible_to(request.user).filter(has_weights=True).select_related("project")


def _make_generate_form(request: HttpRequest, data: QueryDict | None, initial: dict[str, Any]) -> GenerateForm:
    form = GenerateForm(
        data,
        initial=initial,
        models=_models_with_weights(request),
        prompts=datasets_visible_to(request.user).filter(format="prompts").select_related("project"),
        most_devices=most_devices(request.user),
    )
    form.usable_budget = lambda: usable_budget(request.user)
    return form


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
