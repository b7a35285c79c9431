"""Epochs of a job spec become steps."""

from typing import Any

import pytest
from django.contrib.auth.models import User

from optimizer.base.errors import InvalidWorkload
from tests.webapp.conftest import make_spec
from webapp.catalog.bundled import ensure_bundled
from webapp.catalog.models import Dataset, Model
from webapp.jobs.specs.epochs import count_epoch_rows
from webapp.jobs.specs.training import JobSpec, read_spec

pytestmark = pytest.mark.django_db


@pytest.fixture
def read(ada: User) -> Any:
    ensure_bundled()
    model, dataset = Model.objects.get(name="headroom-chat-4m"), Dataset.objects.get(name="kjv-chats")

    def make(**workload: Any) -> JobSpec:
        given = {"sequence_length": 256, "global_batch_size": 8, **workload}
        return read_spec(ada, make_spec(model, dataset, workload=given))

    return make


def test_an_epoch_passes_over_every_row_that_is_not_kept_for_validation(read: Any) -> None:
    assert read(packing="off", num_epochs=1).workload.num_steps == round(1140 / 8)  # 60 of 1,200 chats are kept
    assert read(packing="off", num_epochs=2.5).workload.num_steps == round(2.5 * 1140 / 8)


def test_packed_rows_are_fewer(read: Any) -> None:
    spec = read(packing="best_fit", num_epochs=1)
    assert spec.workload.num_steps == round(count_epoch_rows(spec.dataset, spec.model, spec.workload) / 8)
    assert spec.workload.num_steps < 60


def test_a_part_of_an_epoch_is_at_least_a_step(read: Any) -> None:
    assert read(num_epochs=1e-6).workload.num_steps == 1


@pytest.mark.parametrize(
    "given", [{"num_epochs": 1, "num_steps": 9}, {"num_epochs": 0}, {"num_epochs": "all"}, {"num_epochs": True}]
)
def test_epochs_that_say_nothing_clear_are_refused(read: Any, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidWorkload, match=r"workload\.num_epochs is"):
        read(**given)
