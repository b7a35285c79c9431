"""Uploads in pieces: a cut is gone on from, a wrong hash is refused, what is left alone goes."""

import hashlib
import io
import json
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone
from pytest_django import Settings

from tests.webapp.conftest import TINY_CONFIG
from webapp.catalog import uploads
from webapp.catalog.errors import CatalogConflict
from webapp.catalog.models import Dataset, Model, Upload

pytestmark = pytest.mark.django_db

TEXT = b"In the beginning God created the heaven and the earth.\n" * 40


@pytest.fixture
def api(client: Client, ada: User) -> Client:
    client.force_login(ada)
    return client


def announced(name: str, content: bytes) -> dict[str, Any]:
    return {"name": name, "num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def begin(api: Client, *files: Any, kind: str = "dataset", **more: Any) -> Any:
    body = {"kind": kind, "name": "mine", "files": list(files), **more}
    return api.post("/api/v1/uploads", json.dumps(body), content_type="application/json")


def put(api: Client, upload_id: str, piece: bytes, *, offset: int, number: int = 0, **headers: Any) -> Any:
    path = f"/api/v1/uploads/{upload_id}/files/{number}?offset={offset}"
    return api.put(path, piece, content_type="application/octet-stream", headers=headers)


def finish(api: Client, upload_id: str) -> Any:
    return api.post(f"/api/v1/uploads/{upload_id}/finish")


def test_a_dataset_arrives_in_pieces(api: Client, ada: User, headroom_home: Path) -> None:
    upload = begin(api, announced("verse.txt", TEXT)).json()
    assert put(api, upload["id"], TEXT[:1000], offset=0).json()["received_bytes"] == 1000
    assert put(api, upload["id"], TEXT[1000:], offset=1000).json()["received_bytes"] == len(TEXT)
    answer = finish(api, upload["id"])
    assert answer.status_code == 201
    row = Dataset.objects.get(pk=answer.json()["id"])
    assert (row.owner, row.sha256) == (ada, hashlib.sha256(TEXT).hexdigest())
    assert (headroom_home / row.file).read_bytes() == TEXT
    assert not Upload.objects.exists()
    assert list((headroom_home / "uploads").iterdir()) == []


def test_a_model_arrives_with_its_files(api: Client, headroom_home: Path) -> None:
    config = json.dumps(TINY_CONFIG).encode()
    upload = begin(api, announced("config.json", config), kind="model").json()
    put(api, upload["id"], config, offset=0)
    answer = finish(api, upload["id"])
    assert answer.status_code == 201, answer.json()
    assert Model.objects.get(pk=answer.json()["id"]).model_type == "gpt2"


def test_after_a_cut_the_server_says_where_to_go_on(api: Client) -> None:
    upload = begin(api, announced("verse.txt", TEXT)).json()
    put(api, upload["id"], TEXT[:700], offset=0)
    [listed] = api.get("/api/v1/uploads").json()["results"]
    assert listed["files"][0]["received_bytes"] == 700
    again = put(api, upload["id"], TEXT[:700], offset=0)
    assert again.status_code == 409
    assert (again.json()["code"], again.json()["extra"]["received_bytes"]) == ("wrong_offset", 700)
    assert put(api, upload["id"], TEXT[700:], offset=700).status_code == 200


def test_an_upload_whose_files_are_gone_is_gone_on_with_from_the_start(api: Client, headroom_home: Path) -> None:
    """A backup has its row without them."""
    upload = begin(api, announced("verse.txt", TEXT)).json()
    put(api, upload["id"], TEXT[:700], offset=0)
    shutil.rmtree(headroom_home / "uploads")
    assert api.get(f"/api/v1/uploads/{upload['id']}").json()["files"][0]["received_bytes"] == 0
    refused = put(api, upload["id"], TEXT[700:], offset=700)
    assert (refused.status_code, refused.json()["extra"]["received_bytes"]) == (409, 0)
    assert put(api, upload["id"], TEXT, offset=0).status_code == 200
    assert finish(api, upload["id"]).status_code == 201


def test_an_empty_file_of_which_no_piece_came_needs_no_folder(api: Client, headroom_home: Path) -> None:
    empty = begin(api, announced("verse.txt", b"")).json()
    shutil.rmtree(headroom_home / "uploads", ignore_errors=True)
    answer = finish(api, empty["id"])
    assert (answer.status_code, answer.json()["code"]) == (422, "bad_dataset")


def test_a_piece_for_an_upload_that_was_given_up_meanwhile_leaves_nothing(ada: User, api: Client, headroom_home: Path) -> None:
    upload = Upload.objects.get(pk=begin(api, announced("verse.txt", TEXT)).json()["id"])
    uploads.drop_upload(upload)
    with pytest.raises(CatalogConflict, match="the upload of mine was finished or given up"):
        uploads.add_piece(upload, 0, offset_bytes=0, piece=io.BytesIO(TEXT))
    assert not (headroom_home / "uploads" / upload.pk).exists()


def test_a_piece_that_is_not_what_was_sent_leaves_nothing(api: Client) -> None:
    upload = begin(api, announced("verse.txt", TEXT)).json()
    answer = put(api, upload["id"], TEXT[:500], offset=0, **{"X-Piece-SHA256": "0" * 64})
    assert answer.status_code == 422
    assert "sha256" in answer.json()["detail"]
    assert api.get(f"/api/v1/uploads/{upload['id']}").json()["files"][0]["received_bytes"] == 0


def test_more_than_was_announced_is_refused(api: Client) -> None:
    upload = begin(api, announced("verse.txt", TEXT)).json()
    assert put(api, upload["id"], TEXT + b"x", offset=0).status_code == 422
    assert put(api, upload["id"], TEXT, offset=0).status_code == 200


def test_a_file_with_another_hash_is_refused_and_must_be_sent_again(api: Client) -> None:
    upload = begin(api, announced("verse.txt", TEXT)).json()
    put(api, upload["id"], TEXT[::-1], offset=0)
    answer = finish(api, upload["id"])
    assert answer.status_code == 422
    assert "announced was" in answer.json()["detail"]
    assert not Dataset.objects.exists()
    put(api, upload["id"], TEXT, offset=0)
    assert finish(api, upload["id"]).status_code == 201


def test_an_incomplete_upload_is_not_finished(api: Client) -> None:
    upload = begin(api, announced("verse.txt", TEXT)).json()
    put(api, upload["id"], TEXT[:10], offset=0)
    answer = finish(api, upload["id"])
    assert answer.status_code == 409
    assert answer.json()["detail"] == f"verse.txt is not complete: 10 of {len(TEXT):,} bytes are here"
    assert answer.json()["hint"] == "Go on at byte 10."


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([{"name": "../x.txt", "num_bytes": 1, "sha256": "0" * 64}], "files.0.name"),
        ([{"name": "x.txt", "num_bytes": -1, "sha256": "0" * 64}], "files.0.num_bytes"),
        ([{"name": "x.txt", "num_bytes": 1, "sha256": "F" * 64}], "files.0.sha256"),
        ([{"name": "x.txt", "num_bytes": 1, "mark": "a\nb"}], "files.0.mark"),
        ([{"name": "additional_chat_templates/../x.jinja", "num_bytes": 1}], "files.0.name"),
        ([], "allowed: one file"),
    ],
)
def test_what_cannot_be_taken_is_refused_before_a_byte_is_sent(
    api: Client, files: list[dict[str, Any]], said: str
) -> None:
    answer = begin(api, *files)
    assert answer.status_code == 422
    assert said in answer.json()["detail"]
    assert not Upload.objects.exists()


def test_a_model_without_a_config_is_refused(api: Client) -> None:
    answer = begin(api, announced("model.safetensors", b"x"), kind="model")
    assert "config.json or a GGUF file among them" in answer.json()["detail"]


def test_what_the_disk_has_no_room_for_is_refused_with_both_figures(
    api: Client, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.HEADROOM_DISK_RESERVE_BYTES = 2 * 1024**3
    free = shutil.disk_usage("/")._replace(free=3 * 1024**3)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    assert begin(api, {"name": "a.txt", "num_bytes": 2**30 - 100}).status_code == 201
    answer = begin(api, {"name": "b.txt", "num_bytes": 101})
    assert (answer.status_code, answer.json()["code"]) == (507, "disk_full")
    assert answer.json()["detail"] == (
        "the files have 101 bytes; the disk has room for 100: what is free, less a reserve of 2.00 GiB and 1,073,741,724 bytes "
        "that other uploads wait for"
    )
    assert begin(api, {"name": "b.txt", "num_bytes": 100}).status_code == 201


def test_an_administrator_may_set_a_limit(api: Client, settings: Settings) -> None:
    settings.HEADROOM_MAX_UPLOAD_BYTES = 100
    answer = begin(api, {"name": "a.txt", "num_bytes": 101})
    assert (answer.status_code, answer.json()["detail"]) == (422, "the files have 101 bytes; allowed: at most 100")


def test_a_browser_s_files_come_without_a_hash_and_with_a_mark(api: Client, headroom_home: Path) -> None:
    files = {
        "config.json": json.dumps(TINY_CONFIG).encode(),
        "additional_chat_templates/tool_use.jinja": b"tools",
        "generation_config.json": b'{"eos_token_id": [1, 2]}',
    }
    announcements = [{"name": name, "num_bytes": len(content), "mark": "17"} for name, content in files.items()]
    upload = begin(api, *announcements, kind="model").json()
    assert [(file["mark"], file["sha256"]) for file in upload["files"]] == [("17", "")] * 3
    for number, content in enumerate(files.values()):
        put(api, upload["id"], content, offset=0, number=number, **{"X-Piece-SHA256": hashlib.sha256(content).hexdigest()})
    model = Model.objects.get(pk=finish(api, upload["id"]).json()["id"])
    assert model.generation == {"end_ids": [1, 2]}
    assert (headroom_home / model.folder / "additional_chat_templates" / "tool_use.jinja").read_bytes() == b"tools"


def test_nobody_else_can_see_or_send_it(api: Client, client: Client, eve: User) -> None:
    upload = begin(api, announced("verse.txt", TEXT)).json()
    client.force_login(eve)
    assert client.get("/api/v1/uploads").json()["results"] == []
    assert client.get(f"/api/v1/uploads/{upload['id']}").status_code == 404
    assert put(client, upload["id"], TEXT, offset=0).status_code == 404
    assert finish(client, upload["id"]).status_code == 404


def test_an_upload_can_be_given_up(api: Client, headroom_home: Path) -> None:
    upload = begin(api, announced("verse.txt", TEXT)).json()
    assert api.delete(f"/api/v1/uploads/{upload['id']}").status_code == 204
    assert not (headroom_home / "uploads" / upload["id"]).exists()


def test_only_what_nothing_came_for_in_a_day_is_removed(api: Client, headroom_home: Path) -> None:
    old, new = (begin(api, announced("verse.txt", TEXT)).json()["id"] for _ in range(2))
    for each in (old, new):
        put(api, each, TEXT[:10], offset=0)
    Upload.objects.filter(pk=old).update(updated_at=timezone.now() - uploads.KEPT - timedelta(minutes=1))
    assert uploads.drop_abandoned() == [old]
    assert [path.name for path in (headroom_home / "uploads").iterdir()] == [new]


def test_one_person_s_unfinished_uploads_are_bounded_in_bytes_too(api: Client, settings: Settings) -> None:
    settings.HEADROOM_MAX_OPEN_UPLOAD_BYTES = 100
    first = begin(api, {"name": "a.txt", "num_bytes": 60}).json()
    answer = begin(api, {"name": "b.txt", "num_bytes": 41})
    said = "this upload has 41 bytes and your unfinished ones 60; allowed: 100 together"
    assert (answer.status_code, answer.json()["detail"]) == (409, said)
    assert begin(api, {"name": "b.txt", "num_bytes": 40}).status_code == 201
    api.delete(f"/api/v1/uploads/{first['id']}")
    assert begin(api, {"name": "c.txt", "num_bytes": 60}).status_code == 201


def test_below_the_floor_of_free_disk_no_piece_is_accepted(
    api: Client, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = begin(api, announced("verse.txt", TEXT)).json()
    settings.HEADROOM_DISK_FLOOR_BYTES = 2 * 1024**3
    free = shutil.disk_usage("/")._replace(free=1024**3)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    answer = put(api, upload["id"], TEXT, offset=0)
    said = "the disk of the service has 1.00 GiB free; nothing new is accepted below 2.00 GiB"
    assert (answer.status_code, answer.json()["code"], answer.json()["detail"]) == (507, "disk_full", said)


def test_twenty_open_uploads_are_enough(api: Client) -> None:
    for _ in range(uploads.MAX_OPEN):
        assert begin(api, announced("verse.txt", TEXT)).status_code == 201
    assert begin(api, announced("verse.txt", TEXT)).status_code == 409
