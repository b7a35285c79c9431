"""Models from the hub: pinned, checked, resumed, confined; a local server stands for the hub and does what it should not."""

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from pytest_django import Settings

from optimizer.base.errors import DiskFull
from tests.webapp.catalog.hub.server import COMMIT, Hub
from tests.webapp.catalog.test_linked import safetensors
from tests.webapp.conftest import TINY_CONFIG
from webapp.accounts.tokens import create_token
from webapp.catalog.hub.client import HubFailed, HubRefused, read_reference
from webapp.catalog.hub.download import MAX_FAILURES, advance_downloads, begin_download
from webapp.catalog.models import Model, Upload
from webapp.catalog.uploads import drop_upload

WEIGHTS = safetensors("a", 200_000)
FILES = {
    "config.json": json.dumps(TINY_CONFIG).encode(),
    "chat_template.jinja": b"hello",
    "generation_config.json": b'{"eos_token_id": [1, 2]}',
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"\x80\x04",
    "README.md": b"hello",
    "original/consolidated.00.pth": b"\x80\x04",
}


@pytest.fixture
def as_ada(ada: User) -> Client:
    _, text = create_token(user=ada, name="test")
    return Client(headers={"Authorization": f"Bearer {text}"})


@pytest.fixture
def hub(settings: Settings) -> Iterator[Hub]:
    server = Hub(FILES, large=("model.safetensors",))
    settings.HEADROOM_HUB = True
    settings.HEADROOM_HUB_URL = f"http://{server.host}"
    settings.HEADROOM_HUB_HOSTS = [server.file_host]
    settings.HEADROOM_RETRY_BASE_S = 0.0
    yield server
    server.close()


def begin(ada: User, reference: str = "acme/small") -> Upload:
    return begin_download(owner=ada, name="", reference=reference)


def source_of(upload: Upload) -> dict[str, Any]:
    upload.refresh_from_db()
    return dict(upload.source)


def test_a_model_is_fetched_at_the_commit_that_its_revision_was(ada: User, hub: Hub, headroom_home: Path) -> None:
    upload = begin(ada, "hub:acme/small@v1")
    assert (upload.name, source_of(upload)["commit"], source_of(upload)["state"]) == ("small", COMMIT, "downloading")
    assert advance_downloads() == [upload.pk]
    model = Model.objects.get(pk=source_of(upload)["model"])
    assert (headroom_home / model.folder / "model.safetensors").read_bytes() == WEIGHTS
    assert (model.owner, model.has_weights, model.generation) == (ada, True, {"end_ids": [1, 2]})
    assert json.loads((headroom_home / model.folder / "chat.json").read_text())["template"] == "hello"
    asked = [path for _, path, _ in hub.requests]
    assert not any(path.endswith((".bin", ".pth", "README.md")) for path in asked)
    assert all(COMMIT in path for path in asked if "resolve" in path)
    assert not (headroom_home / "uploads" / upload.pk).exists()


def test_a_cut_is_gone_on_from(ada: User, hub: Hub) -> None:
    hub.cut_after = [300_000, 100_000]
    upload = begin(ada)
    assert advance_downloads() == []
    assert source_of(upload)["message"].endswith("trying again")
    assert advance_downloads() == []
    assert advance_downloads() == [upload.pk]
    assert hub.asked_for("model.safetensors") == ["", "bytes=300000-", "bytes=400000-"]
    assert source_of(upload)["state"] == "done"


def test_a_server_without_ranges_sends_all_of_it_again(ada: User, hub: Hub, headroom_home: Path) -> None:
    hub.cut_after, hub.ignores_ranges = [300_000], True
    upload = begin(ada)
    advance_downloads()
    assert advance_downloads() == [upload.pk]
    model = Model.objects.get(pk=source_of(upload)["model"])
    assert (headroom_home / model.folder / "model.safetensors").read_bytes() == WEIGHTS


def test_what_was_stopped_between_two_pieces_goes_on(ada: User, hub: Hub) -> None:
    upload = begin(ada)
    assert advance_downloads(lambda: bool(hub.asked_for("model.safetensors"))) == []
    assert source_of(upload)["state"] == "downloading"
    assert advance_downloads() == [upload.pk]


def test_a_download_whose_files_are_gone_begins_anew(ada: User, hub: Hub, headroom_home: Path) -> None:
    """A backup has its row without them."""
    hub.cut_after = [300_000]
    upload = begin(ada)
    advance_downloads()
    shutil.rmtree(headroom_home / "uploads")
    assert advance_downloads() == [upload.pk]
    assert hub.asked_for("model.safetensors") == ["", ""]


def test_one_that_fails_keeps_none_of_the_others_waiting(ada: User, hub: Hub, headroom_home: Path) -> None:
    no_folder, no_source, good = (begin(ada) for _ in range(3))
    (headroom_home / "uploads").mkdir()
    (headroom_home / "uploads" / no_folder.pk).write_text("in the way")
    Upload.objects.filter(pk=no_source.pk).update(source={"state": "downloading"})
    assert advance_downloads() == [good.pk]
    assert source_of(no_folder)["message"] == "what comes cannot be kept: File exists; trying again"


def test_one_that_is_given_up_while_another_is_fetched_is_left_alone(ada: User, hub: Hub, headroom_home: Path) -> None:
    first, second = begin(ada), begin(ada)

    def give_up() -> bool:
        if hub.asked_for("model.safetensors"):
            drop_upload(second)
        return False

    assert advance_downloads(give_up) == [first.pk]
    assert list((headroom_home / "uploads").iterdir()) == []


def test_other_bytes_than_the_hash_names_are_refused(ada: User, hub: Hub) -> None:
    upload = begin(ada)
    hub.files["model.safetensors"] = WEIGHTS[:-1] + b"\x01"
    assert advance_downloads() == []
    assert "has sha256" in source_of(upload)["message"]
    assert source_of(upload)["state"] == "failed"
    small = begin(ada)
    hub.files["config.json"] = FILES["config.json"].replace(b"300", b"301")
    assert advance_downloads() == []
    assert "config.json is not what the commit names" in source_of(small)["message"]
    assert not Model.objects.exists()


@pytest.mark.parametrize("lie", ["sizes", "linked_sizes", "longer"])
def test_a_hub_that_lies_about_a_size_is_refused(ada: User, hub: Hub, lie: str, headroom_home: Path) -> None:
    if lie == "sizes":
        hub.sizes["model.safetensors"] = 100
    if lie == "linked_sizes":
        hub.linked_sizes["model.safetensors"] = 100
    upload = begin(ada)
    if lie == "longer":
        hub.files["model.safetensors"] = WEIGHTS * 2
    assert advance_downloads() == []
    assert source_of(upload)["state"] == "failed"
    assert "as it was announced" in source_of(upload)["message"]
    assert not (headroom_home / "uploads" / upload.pk).exists()


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/x", "http://169.254.169.254/latest", "file:///etc/passwd", "https://{host}/x"])
def test_a_redirect_to_another_host_is_not_followed(ada: User, hub: Hub, address: str) -> None:
    upload = begin(ada)
    hub.redirect_to = address.replace("{host}", hub.host)
    assert advance_downloads() == []
    assert source_of(upload)["message"].startswith("hub: it sends to ")
    assert hub.asked_for("model.safetensors") == []


def test_a_circle_of_redirects_ends(ada: User, hub: Hub) -> None:
    upload = begin(ada)
    hub.redirect_to = f"http://{hub.host}/acme/small/resolve/{COMMIT}/model.safetensors"
    assert advance_downloads() == []
    assert "redirects more than 5 times" in source_of(upload)["message"]


def test_the_token_goes_to_the_hub_alone_and_into_no_log(
    ada: User, hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HEADROOM_HUB_TOKEN", "hf_secret")
    caplog.set_level(logging.DEBUG)
    hub.cut_after = [10]
    hub.redirect_to = f"http://{hub.file_host}/files/model.safetensors?signature=hf_secret"
    upload = begin(ada)
    advance_downloads()
    assert advance_downloads() == [upload.pk]
    for host, _, headers in hub.requests:
        assert headers.get("authorization") == ("Bearer hf_secret" if host == hub.host else None)
    assert "hf_secret" not in caplog.text + json.dumps(source_of(upload))


@pytest.mark.parametrize(("status", "text"), [(401, "does not let this service read"), (404, "there is no such model")])
def test_what_the_hub_refuses_is_refused_at_once(ada: User, hub: Hub, status: int, text: str) -> None:
    hub.status = status
    with pytest.raises(HubRefused, match=text):
        begin(ada)
    hub.status = 503
    with pytest.raises(HubFailed, match="the hub answered 503"):
        begin(ada)


def test_a_hub_that_stays_away_is_given_up_at_last(ada: User, hub: Hub) -> None:
    upload = begin(ada)
    hub.status = 503
    for _ in range(MAX_FAILURES):
        assert advance_downloads() == []
    assert source_of(upload)["message"] == f"the hub answered 503; given up after {MAX_FAILURES} tries"


def test_a_model_without_safetensors_is_refused(ada: User, hub: Hub) -> None:
    del hub.files["model.safetensors"]
    with pytest.raises(HubRefused, match="holds no config.json with safetensors"):
        begin(ada)


def test_the_disk_is_looked_at_first(ada: User, hub: Hub, monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    settings.HEADROOM_DISK_RESERVE_BYTES = 0
    free = shutil.disk_usage("/")._replace(free=1_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(DiskFull, match="the disk has room for 1,000"):
        begin(ada)
    assert [path for _, path, _ in hub.requests] == ["/api/models/acme/small/revision/main"]


@pytest.mark.parametrize("reference", ["", "a/b/c", "../x", "a/..", "a b", "acme/small@", "acme/small@a b", "x\n", "http://x/y"])
def test_what_names_no_model_is_refused(reference: str) -> None:
    with pytest.raises(HubRefused, match="names no model"):
        read_reference(reference)


def test_it_is_closed_unless_an_administrator_opens_it(as_ada: Client, settings: Settings) -> None:
    assert settings.HEADROOM_HUB is False
    answer = as_ada.post("/api/v1/models", {"hub": "acme/small"})
    assert (answer.status_code, answer.json()["code"]) == (422, "hub_refused")
    assert answer.json()["hint"] == "An administrator opens it with HEADROOM_HUB=1."


def test_the_api_answers_with_an_upload_that_says_how_far_it_is(as_ada: Client, hub: Hub) -> None:
    answer = as_ada.post("/api/v1/models", {"hub": "acme/small", "name": "mine"})
    assert answer.status_code == 202, answer.content
    upload = answer.json()
    assert (upload["name"], upload["source"]["state"]) == ("mine", "downloading")
    assert advance_downloads() == [upload["id"]]
    now = as_ada.get(f"/api/v1/uploads/{upload['id']}").json()
    assert now["source"]["state"] == "done"
    assert as_ada.get(f"/api/v1/models/{now['source']['model']}").json()["name"] == "mine"


def test_the_page_has_a_field_and_shows_how_far_it_is(ada: User, hub: Hub, settings: Settings) -> None:
    client = Client()
    client.force_login(ada)
    answer = client.post("/models/", {"name": "mine", "hub": "acme/small"}, follow=True).content.decode()
    assert "acme/small at 0123456789ab" in answer
    assert '<progress max="800' in answer
    assert advance_downloads()
    assert "From the hub" not in client.get("/models/").content.decode()
    assert "there is no such model" in client.post("/models/", {"name": "x", "hub": "acme/other"}).content.decode()
    both = client.post("/models/", {"name": "x", "hub": "acme/small", "path": "/x"}).content.decode()
    assert "Folder on the server" not in both
    settings.HEADROOM_HUB = False
    assert "Hugging Face hub" not in client.get("/models/").content.decode()
