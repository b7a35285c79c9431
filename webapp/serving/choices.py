"""The models that the Chat page offers: those with weights, and what finished runs made of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from webapp.catalog.distinct_names import distinct_names
from webapp.catalog.queries import models_visible_to
from webapp.jobs.models import Job
from webapp.serving.names import tuned_runs

MAX_RUNS = 50


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One that can answer."""

    name: str
    """The name that a request gives."""
    label: str
    base: str
    """Name of the model that a run tuned; empty for a model itself."""


def list_choices(user: Any) -> list[Choice]:
    """Models by name, then runs, the newest first."""
    rows = models_visible_to(user).filter(has_weights=True).select_related("project").order_by("name", "pk")
    names = distinct_names(rows)
    models = [Choice(name=model.pk, label=names[model.pk], base="") for model in rows]
    return models + [_of_run(run) for run in tuned_runs(user, limit=MAX_RUNS)]


def choose_pair(choices: Sequence[Choice], *, wanted: Sequence[str]) -> tuple[Choice | None, Choice | None]:
    """The two that stand side by side: those asked for; a run beside its base; else the newest run, or a model alone."""
    by_name = {choice.name: choice for choice in choices}
    named = [by_name[name] for name in wanted if name in by_name]
    tuned = next((choice for choice in [*named, *choices] if choice.base), None)
    if len(named) > 1:
        return named[0], named[1]
    if named and not named[0].base:
        return named[0], next((choice for choice in choices if choice.base == named[0].name), None)
    if tuned is not None:
        return by_name.get(tuned.base), tuned
    return (choices[0] if choices else None), None


def _of_run(run: Job) -> Choice:
    return Choice(name=run.pk, label=f"{run.name} ({run.model.name}, tuned)", base=run.model_id)
