"""A document that is refused: by name, in few words, and with a value that can be written as JSON again."""

import json
from typing import Any

import pytest

from optimizer.base.errors import InvalidInput
from optimizer.base.serialize import from_json
from optimizer.workload import TrainingWorkload

_DEEP: list = []
for _ in range(900):
    _DEEP = [_DEEP]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("learning_rate", 10**400, "a number of at most 1.8e308"),
        ("learning_rate", float("inf"), "a number above 0 to 1"),
        ("num_steps", 10**4000, "an integer from 1 to 100,000,000"),
        ("num_steps", float("nan"), "an integer"),
        ("num_steps", _DEEP, "an integer"),
        ("num_steps", "x" * 100_000, "an integer"),
        ("y" * 100_000, 1, "is not a known field"),
    ],
)
def test_a_monstrous_value_is_refused_in_few_words_that_are_json(name: str, value: Any, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason) as found:
        from_json(TrainingWorkload, {name: value}, path="workload")
    text = json.dumps(found.value.to_json(), allow_nan=False)
    assert len(text) < 2_000
