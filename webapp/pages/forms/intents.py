"""Intents that the New job page starts from: the recipes of ``webapp/jobs/specs/recipes.py`` as the fields that each fills."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from webapp.jobs.specs.recipes import RECIPES
from webapp.pages.forms.pins import written_pins
from webapp.pages.forms.work import WorkForm

_CLEARED: Final = {
    "use_adapters": "",
    "mode": "",
    "train_on": "",
    "packing": "",
    "loss_on": "",
    "most_loss": "",
    "pin_weights_frozen": "",
}
"""Fields that recipes decide between; a recipe that names one sets it."""


@dataclass(frozen=True, kw_only=True)
class Intent:
    """One card of the page."""

    name: str
    title: str
    sentence: str
    changes: dict[str, str]
    is_chosen: bool
    """The form stands as this intent would leave it."""


def list_intents(form: WorkForm) -> list[Intent]:
    """In the recipes' order; at most one is chosen."""
    return [
        Intent(
            name=recipe.name,
            title=recipe.title,
            sentence=recipe.sentence,
            changes=(changes := {**_CLEARED, **fields_of({"workload": recipe.workload, "goal": recipe.goal})}),
            is_chosen=all(_stands(form, field, text) for field, text in changes.items() if field in _CLEARED),
        )
        for recipe in RECIPES.values()
    ]


def fields_of(change: Mapping[str, Any]) -> dict[str, str]:
    """A part of a job spec, its workload and its goal without budgets, as text of the form's fields."""
    workload = dict(change.get("workload", {}))
    adapter = workload.pop("adapter", None)
    objective = workload.pop("objective", None)
    fields = {name: str(value) for name, value in workload.items() if name != "mode"}
    if adapter is not None:
        fields |= {"use_adapters": "on", "rank": str(adapter["rank"])}
        if "alpha" in adapter:
            fields["alpha"] = f"{adapter['alpha']:g}"
    if objective is not None:
        fields["train_on"] = str(objective)
    goal = change.get("goal", {})
    if goal.get("allow_lossy") or goal.get("most_loss"):
        fields["most_loss"] = str(goal.get("most_loss", "any"))
    return fields | written_pins(goal.get("pins", {}))


def _stands(form: WorkForm, field: str, text: str) -> bool:
    value = form[field].value()
    typed = "on" if value is True else "" if value in (None, False) else str(value)
    return typed == text
