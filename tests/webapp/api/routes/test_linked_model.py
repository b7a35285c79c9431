"""``POST /models`` with a path: linked where the folder is open and the same, refused with a stable code elsewhere."""

import json
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from pytest_django import Settings

from tests.webapp.catalog.test_linked import write_folder
from tests.webapp.conftest import make_person


@pytest.fixture
def folder(tmp_path: Path, settings: Settings) -> Path:
    settings.HEADROOM_MODEL_ROOTS = [tmp_path / "open"]
    return write_folder(tmp_path / "open" / "llama")


def post(client: Client, **fields: Any) -> Any:
    return client.post("/api/v1/models", {"name": "mine", **fields})


def test_a_folder_is_linked(as_ada: Client, folder: Path) -> None:
    stat = (folder / "config.json").stat()
    answer = post(as_ada, path=str(folder), seen=json.dumps({"config.json": [stat.st_size, stat.st_mtime_ns]}))
    assert answer.status_code == 201, answer.content
    made = answer.json()
    assert (made["linked_from"], made["has_weights"], made["has_chat"]) == (str(folder), True, True)
    assert made["generation"]["end_ids"] == [1, 3]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"path": "/etc"}, "path_not_allowed"),
        ({"path": "relative"}, "path_not_allowed"),
        ({"path": "{}", "seen": '{"config.json": [1, 1]}'}, "path_differs"),
        ({"path": "{}", "seen": "["}, "invalid_input"),
        ({}, "bad_model"),
    ],
)
def test_a_path_that_cannot_be_used_has_a_code(as_ada: Client, folder: Path, fields: dict[str, str], code: str) -> None:
    answer = post(as_ada, **{name: text.replace("{}", str(folder)) if name == "path" else text for name, text in fields.items()})
    assert (answer.status_code, answer.json()["code"]) == (422, code)


def test_the_page_has_a_field_for_it_only_where_folders_are_open(db: None, folder: Path, settings: Settings) -> None:
    client = Client()
    client.force_login(make_person("bob"))
    assert "Folder on the server" in client.get("/models/").content.decode()
    answer = client.post("/models/", {"name": "mine", "path": str(folder)}, follow=True)
    assert "Model mine is ready to use." in answer.content.decode()
    assert ">linked</td>" in answer.content.decode()
    refused = client.post("/models/", {"name": "mine", "path": "/etc"}).content.decode()
    assert "is not there, or outside of the folders that are open" in refused
    settings.HEADROOM_MODEL_ROOTS = []
    assert "Folder on the server" not in client.get("/models/").content.decode()
    assert "Choose the file config.json." in client.post("/models/", {"name": "mine"}).content.decode()
