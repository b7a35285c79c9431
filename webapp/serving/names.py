"""The meaning of a model's name in a request: a model of the catalog, with the adapter or the weights of a finished run.

``NAME`` is the model as it is; ``NAME:RUN`` what a run on it left, by the run's id or name; a run's id or name says it, too.
"""

from dataclasses import dataclass
from typing import Any

from django.db.models import Exists, OuterRef, QuerySet

from webapp.batches.answers import RequestRefused
from webapp.catalog.models import Model
from webapp.catalog.queries import models_visible_to
from webapp.jobs.models import TERMINAL_STATES, Artifact, Job, Kind
from webapp.jobs.queries import jobs_visible_to
from webapp.jobs.specs.generation import check_can_generate
from webapp.jobs.trained_model import what_is_left


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model, and the run whose work is switched on, that answer together."""

    model: Model
    run: Job | None = None
    """The finished run whose work is switched on."""
    is_adapter: bool = False
    """The run left adapters, which are switched on beside the model; else a whole model, which is held by itself."""

    @property
    def name(self) -> str:
        return f"{self.model.name}:{self.run.pk}" if self.run else self.model.name

    @property
    def adapter(self) -> str:
        return self.run.pk if self.run and self.is_adapter else ""

    @property
    def weights_job(self) -> str:
        return self.run.pk if self.run and not self.is_adapter else ""


def find_target(user: Any, name: str) -> Target:
    """Raises RequestRefused (404) for a name that means nothing to this person, InvalidModel for what cannot generate."""
    rows = models_visible_to(user)
    if (model := _model(rows, name)) is not None:
        check_can_generate(model)
        return Target(model=model)
    base_name, _, run_name = name.rpartition(":")
    run = _run(user, run_name or name, _model(rows, base_name) if base_name else None)
    if run is None or (base_name and _model(rows, base_name) is None):
        raise RequestRefused(
            f"the model {name[:120]!r} is not there; GET /v1/models lists those that are, and NAME:RUN is what a run left",
            param="model",
            status=404,
            code="model_not_found",
        )
    return target_of_run(run)


def target_of_run(run: Job) -> Target:
    """Raises RequestRefused for a run that left nothing that can answer, InvalidModel."""
    if not left_of(run):
        raise RequestRefused(
            f"job {run.pk} left nothing that can answer: it is {run.state}; allowed: a finished training run",
            param="model",
            code="model_not_found",
            status=404,
        )
    if is_adapter := left_of(run) == "adapter":
        check_can_generate(run.model)
    return Target(model=run.model, run=run, is_adapter=is_adapter)


def tuned_runs(user: Any, *, limit: int = 200) -> "QuerySet[Job]":
    """Finished runs that left adapters or a model, the newest first."""
    rows = jobs_visible_to(user).filter(kind=Kind.TRAIN, state__in=TERMINAL_STATES, model__deleted_at__isnull=True)
    left = Exists(Artifact.objects.filter(job=OuterRef("pk"), kind__in=("adapter", "model")))
    return rows.filter(left).select_related("model", "owner").order_by("-pk")[:limit]


def left_of(run: Job) -> str:
    """``adapter`` wherever there is one, since that is held beside its model; ``model``, or nothing."""
    if run.kind != Kind.TRAIN or not run.is_terminal or not what_is_left(run):
        return ""
    return "adapter" if run.artifacts.filter(kind="adapter").exists() else "model"


def _model(rows: "QuerySet[Model]", name: str) -> Model | None:
    """By id, else by name; one's own before what ships with the program."""
    found = rows.filter(pk=name).first()
    if found is not None or not name:
        return found
    named = list(rows.filter(name=name).order_by("-pk"))
    return next((row for row in named if row.owner_id is not None), named[0] if named else None)


def _run(user: Any, name: str, model: Model | None) -> Job | None:
    rows = jobs_visible_to(user).filter(kind=Kind.TRAIN).select_related("model")
    found = rows.filter(pk=name).first()
    if found is None and name:
        named = rows.filter(name=name, artifacts__kind__in=("adapter", "model"))
        found = (named if model is None else named.filter(model=model)).order_by("-pk").first()
    return found if found is not None and (model is None or found.model_id == model.pk) else None
