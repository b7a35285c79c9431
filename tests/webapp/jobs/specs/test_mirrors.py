"""``mirrors`` of a job spec: those that an administrator has opened, and in words why not others."""

from typing import Any

import pytest
from django.contrib.auth.models import User
from pytest_django import Settings

from optimizer.base.errors import InvalidInput
from tests.webapp.conftest import make_spec
from webapp.catalog.models import Dataset, Model
from webapp.jobs.specs.mirrors import read_mirrors
from webapp.jobs.specs.training import read_spec


@pytest.fixture
def opened(settings: Settings) -> None:
    settings.HEADROOM_MIRRORS = ["mlflow", "wandb"]


def test_mirrors_are_read_once_each_in_one_order(opened: None) -> None:
    assert read_mirrors(["mlflow", "wandb", "mlflow"]) == ("wandb", "mlflow")
    assert read_mirrors(None) == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["tensorboard"], r"mirrors holds 'tensorboard'; allowed: a list of wandb, mlflow"),
        ("wandb", r"mirrors holds 'wandb'; allowed: a list"),
        ([1], r"mirrors holds \[1\]; allowed: a list"),
    ],
)
def test_what_is_no_mirror_is_refused(opened: None, given: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read_mirrors(given)


def test_a_mirror_that_nobody_has_opened_is_refused_with_who_can(settings: Settings) -> None:
    settings.HEADROOM_MIRRORS = []
    with pytest.raises(InvalidInput, match="allowed: none, because none has been opened here") as refused:
        read_mirrors(["wandb"])
    assert "HEADROOM_MIRRORS" in refused.value.hint


def test_a_spec_keeps_its_mirrors_and_is_priced_as_one_without(
    opened: None, ada: User, model: Model, dataset: Dataset
) -> None:
    plain, mirrored = (read_spec(ada, make_spec(model, dataset, **more)) for more in ({}, {"mirrors": ["wandb"]}))
    assert mirrored.to_json() == {**plain.to_json(), "mirrors": ["wandb"]}
    assert mirrored.priced_part() == plain.priced_part()
