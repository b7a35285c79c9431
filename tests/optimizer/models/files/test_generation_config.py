"""generation_config.json says which tokens end an answer, and how to sample where it says to sample."""

import json
from pathlib import Path
from typing import Any

import pytest

from optimizer.base.errors import InvalidModel
from optimizer.models.files.generation_config import GenerationFacts, read_generation_config, read_generation_file


@pytest.mark.parametrize(
    ("document", "facts"),
    [
        ({}, GenerationFacts()),
        ({"eos_token_id": 2}, GenerationFacts(end_ids=(2,))),
        ({"eos_token_id": [3, 1, 3]}, GenerationFacts(end_ids=(3, 1))),
        ({"temperature": 0.6}, GenerationFacts()),
        ({"do_sample": True}, GenerationFacts()),
        ({"do_sample": True, "temperature": 0.6}, GenerationFacts(temperature=0.6, top_k=50, top_p=1.0)),
        ({"do_sample": True, "top_p": 0.9, "top_k": 20}, GenerationFacts(temperature=1.0, top_k=20, top_p=0.9)),
    ],
)
def test_what_is_read_of_it(document: dict[str, Any], facts: GenerationFacts, tmp_path: Path) -> None:
    assert read_generation_config(document) == facts
    (tmp_path / "generation_config.json").write_text(json.dumps(document))
    assert read_generation_file(tmp_path) == facts


def test_without_the_file_nothing_is_said(tmp_path: Path) -> None:
    assert read_generation_file(tmp_path).sampling == {}


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ([], "generation_config.json is not an object"),
        ({"eos_token_id": "x"}, "eos_token_id of generation_config.json is 'x'"),
        ({"eos_token_id": [True]}, "eos_token_id of generation_config.json"),
        ({"do_sample": True, "temperature": 9}, "temperature of generation_config.json is 9; allowed: a number from 0 to 2"),
        ({"do_sample": True, "top_k": float("nan")}, "top_k of generation_config.json is"),
    ],
)
def test_a_wrong_value_is_refused(document: Any, text: str) -> None:
    with pytest.raises(InvalidModel, match=text):
        read_generation_config(document)
