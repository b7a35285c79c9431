"""The API shows models with the settings of their config.json that no price includes, and the description mentions them too."""

import io
import json
from typing import Any

import pytest
from django.test import Client

from tests.webapp.conftest import TINY_CONFIG
from webapp.api.api import openapi_document
from webapp.catalog.models import Model

TOLD = ["the config brings code of its own, which is not run; this is an estimate of transformers' GPT2LMHeadModel"]


@pytest.fixture
def made(as_ada: Client) -> dict[str, Any]:
    file = io.BytesIO(json.dumps({**TINY_CONFIG, "auto_map": {"x": "y"}}).encode())
    file.name = "config.json"
    answer = as_ada.post("/api/v1/models", {"name": "mine", "config": file})
    assert answer.status_code == 201, answer.content
    return answer.json()


def test_settings_not_read_from_a_config_are_listed_when_it_is_sent(made: dict[str, Any]) -> None:
    assert made["unread"] == TOLD


def test_unread_settings_are_in_the_list_and_with_the_one_model(as_ada: Client, made: dict[str, Any]) -> None:
    (row,) = [row for row in as_ada.get("/api/v1/models").json()["results"] if row["id"] == made["id"]]
    assert row == made
    details = as_ada.get(f"/api/v1/models/{made['id']}").json()
    assert {name: details[name] for name in made} == made
    assert details["structure"]["embedding_parameters"] > 0


def test_a_config_that_was_read_whole_lists_no_unread_settings(as_ada: Client, model: Model) -> None:
    assert as_ada.get(f"/api/v1/models/{model.pk}").json()["unread"] == []


def test_the_description_has_it() -> None:
    schemas = openapi_document()["components"]["schemas"]
    assert schemas["ModelRow"]["properties"]["unread"]["items"] == {"type": "string"}
    assert "unread" in schemas["ModelDetails"]["required"]
