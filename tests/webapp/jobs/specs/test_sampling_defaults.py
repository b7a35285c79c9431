"""A generate job whose spec has no word on sampling samples as the model's makers ask for."""

from typing import Any

import pytest
from django.contrib.auth.models import User

from tests.webapp.generation import make_generate_spec
from webapp.catalog.models import Dataset, Model
from webapp.jobs.specs.generation import read_generate_spec


@pytest.mark.parametrize(
    ("workload", "sampling"),
    [
        ({}, (0.6, 20, 0.9)),
        ({"max_new_tokens": 4}, (0.6, 20, 0.9)),
        ({"temperature": 0.0}, (0.0, 0, 1.0)),
        ({"top_p": 0.5}, (0.0, 0, 0.5)),
    ],
)
def test_one_word_on_sampling_is_the_spec_s_own(
    ada: User, writer: Model, prompts: Dataset, workload: dict[str, Any], sampling: tuple[float, int, float]
) -> None:
    writer.generation = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "end_ids": [1]}
    writer.save(update_fields=["generation"])
    read = read_generate_spec(ada, make_generate_spec(writer, prompts, workload=workload)).workload
    assert (read.temperature, read.top_k, read.top_p) == sampling
