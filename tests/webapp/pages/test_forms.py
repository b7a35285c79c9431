"""Forms offer every technique and decision that is declared for their work, with its words."""

from collections.abc import Callable
from typing import Any

import pytest

from optimizer.optimizers import OPTIMIZERS
from optimizer.plan.techniques import TECHNIQUE_LABELS, knobs_of, techniques_for
from webapp.pages.forms.generation import GenerateForm
from webapp.pages.forms.training import JobForm

FORMS: dict[str, Callable[[], Any]] = {
    "training": lambda: JobForm(models=[], datasets=[]),
    "generation": lambda: GenerateForm(models=[], prompts=[]),
}


@pytest.mark.parametrize("work", FORMS)
def test_every_technique_of_the_work_may_be_forbidden(work: str) -> None:
    assert dict(FORMS[work]().fields["forbid"].choices) == {name: TECHNIQUE_LABELS[name] for name in techniques_for(work)}


@pytest.mark.parametrize("work", FORMS)
def test_every_decision_of_the_work_has_a_field_with_its_label(work: str) -> None:
    form = FORMS[work]()
    for knob in knobs_of(work):
        assert form.fields[f"pin_{knob.path.replace('.', '_')}"].label == getattr(knob, work).label


def test_weights_without_masters_are_on_the_form_of_training_alone() -> None:
    choices = [("", "free"), ("fp32", "in fp32"), ("none", "none, rounded at random")]
    assert FORMS["training"]().fields["pin_weights_master"].choices == choices
    assert "pin_weights_master" not in FORMS["generation"]().fields


def test_every_optimizer_is_on_the_form() -> None:
    assert dict(FORMS["training"]().fields["optimizer"].choices) == {
        "adamw": "AdamW",
        "sgd": "SGD",
        "lion": "Lion",
        "adafactor": "Adafactor",
    }
    assert set(OPTIMIZERS) == {"adamw", "sgd", "lion", "adafactor"}
