"""Datasets whose columns have unusual names, and datasets of files on the server: by the API and on the page."""

import json
from pathlib import Path
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from pytest_django import Settings

from tests.webapp.conftest import make_person
from webapp.catalog.models import Dataset

ROWS = b'{"ask": "Who?", "reply": "Me.", "note": "n"}\n{"ask": "Why?", "reply": "So.", "note": "n"}\n'


def add(client: Client, **fields: Any) -> Any:
    return client.post("/api/v1/datasets", {"name": "mine", "file": SimpleUploadedFile("mine.jsonl", ROWS), **fields})


def correct(client: Client, dataset_id: str, columns: Any) -> Any:
    body = json.dumps({"columns": columns})
    return client.patch(f"/api/v1/datasets/{dataset_id}", body, content_type="application/json")


def test_columns_that_nobody_can_find_are_said(as_ada: Client) -> None:
    refused = add(as_ada)
    assert (refused.status_code, refused.json()["code"]) == (422, "bad_dataset")
    assert "columns, as prompt=COLUMN, completion=COLUMN" in refused.json()["hint"]
    made = add(as_ada, columns="prompt=ask, completion=reply").json()
    assert made["columns"] == made["facts"]["columns"] == {"prompt": "ask", "completion": "reply"}
    assert made["facts"]["kind"] == "prompt_completion"
    assert made["facts"]["names"] == ["ask", "reply", "note"]


def test_they_can_be_corrected_and_found_again(as_ada: Client) -> None:
    file = SimpleUploadedFile("mine.jsonl", b'{"text": "wrong", "ask": "Who?", "reply": "Me."}\n')
    made = add(as_ada, file=file).json()
    assert (made["columns"], made["facts"]["kind"]) == (None, "text")
    corrected = correct(as_ada, made["id"], {"prompt": "ask", "completion": "reply"}).json()
    assert corrected["facts"]["kind"] == "prompt_completion"
    assert corrected["preview"].startswith("Who?")
    assert correct(as_ada, made["id"], None).json()["facts"]["kind"] == "text"


def test_a_correction_that_does_not_fit_changes_nothing(as_ada: Client) -> None:
    made = add(as_ada, columns="prompt=ask, completion=reply").json()
    refused = correct(as_ada, made["id"], {"text": "missing"})
    assert (refused.status_code, refused.json()["code"]) == (422, "bad_dataset")
    assert "line 1: no missing" in refused.json()["detail"]
    assert as_ada.get(f"/api/v1/datasets/{made['id']}").json()["columns"] == made["columns"]


def test_what_ships_with_the_program_and_texts_have_no_columns_to_correct(as_ada: Client) -> None:
    text = as_ada.post("/api/v1/datasets", {"name": "text", "file": SimpleUploadedFile("text.txt", b"words")}).json()
    assert "a text has none" in correct(as_ada, text["id"], {"text": "a"}).json()["detail"]
    Dataset.objects.filter(pk=text["id"]).update(owner=None)
    assert correct(as_ada, text["id"], None).status_code == 409


def test_the_page_corrects_them(db: None) -> None:
    client = Client()
    client.force_login(make_person("bob"))
    made = add(client, columns="prompt=ask, completion=reply").json()
    page = f"/datasets/{made['id']}/"
    assert "prompt=ask, completion=reply" in client.get(page).content.decode()
    answer = client.post(f"{page}columns/", {"columns": "text=note"}, follow=True).content.decode()
    assert "mine is read as: text=note." in answer
    refused = client.post(f"{page}columns/", {"columns": "text=gone"}, follow=True).content.decode()
    assert "line 1: no gone" in refused


@pytest.fixture
def folder(tmp_path: Path, settings: Settings) -> Path:
    settings.HEADROOM_DATASET_ROOTS = [tmp_path / "open"]
    folder = tmp_path / "open" / "chats"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(ROWS)
    (folder / "b.csv").write_text("ask,reply\nWhere?,Here.\n")
    return folder


def test_a_folder_on_the_server_becomes_one_dataset(as_ada: Client, folder: Path) -> None:
    fields = {"name": "", "path": str(folder), "columns": "prompt=ask, completion=reply"}
    made = as_ada.post("/api/v1/datasets", fields)
    assert made.status_code == 201, made.content
    assert (made.json()["name"], made.json()["format"], made.json()["num_documents"]) == ("chats", "jsonl", 3)


def test_a_file_on_the_server_is_copied(as_ada: Client, folder: Path, settings: Settings) -> None:
    fields = {"name": "one", "path": str(folder / "b.csv"), "columns": "prompt=ask, completion=reply"}
    made = as_ada.post("/api/v1/datasets", fields).json()
    kept = Path(settings.HEADROOM_HOME) / Dataset.objects.get(pk=made["id"]).file
    (folder / "b.csv").write_text("changed")
    assert kept.read_text() == "ask,reply\nWhere?,Here.\n"


@pytest.mark.parametrize("path", ["/etc/passwd", "{}/gone.jsonl", "relative"])
def test_other_paths_are_refused(as_ada: Client, folder: Path, path: str) -> None:
    answer = as_ada.post("/api/v1/datasets", {"name": "x", "path": path.format(folder)})
    assert (answer.status_code, answer.json()["code"]) == (422, "path_not_allowed")


def test_a_link_that_leads_out_is_refused(as_ada: Client, folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.jsonl"
    secret.write_bytes(ROWS)
    (folder / "c.jsonl").symlink_to(secret)
    answer = as_ada.post("/api/v1/datasets", {"name": "x", "path": str(folder)})
    assert (answer.status_code, answer.json()["code"]) == (422, "path_not_allowed")


def test_a_dataset_is_made_of_one_thing(as_ada: Client, folder: Path) -> None:
    assert as_ada.post("/api/v1/datasets", {"name": "x"}).json()["detail"].startswith("a dataset is made of a file or of a path")
    assert add(as_ada, path=str(folder)).status_code == 422
