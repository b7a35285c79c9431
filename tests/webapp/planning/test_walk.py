"""A job spec's budget takes a short road into the search."""

import pytest
from django.contrib.auth.models import User

from tests.walks import follow
from tests.webapp.conftest import make_spec
from webapp.catalog.models import Dataset, Machine, Model
from webapp.planning.pricing import price_spec
from webapp.planning.search import training

pytestmark = pytest.mark.django_db

BUDGET_BYTES = 2**30 + 12_345
MAX_FILES = 15


def test_a_budget_enters_at_most_fifteen_files_from_the_spec_to_the_first_plan_that_is_priced(
    ada: User, machine: Machine, profiled_llama: Model, dataset: Dataset
) -> None:
    workload = {"sequence_length": 128, "global_batch_size": 4, "num_steps": 10}
    training._search.forget()  # what other tests asked is remembered, and takes a shorter road
    training._memory.forget()
    spec = make_spec(profiled_llama, dataset, workload=workload, goal={"device_budget_bytes": BUDGET_BYTES})
    with follow(
        lambda value: type(value) is int and value == BUDGET_BYTES,
        until=lambda frame: frame.f_code.co_name == "estimate_training",
    ) as walk:
        price_spec(ada, spec)

    assert len(walk.files) <= MAX_FILES, "\n".join(walk.files)
