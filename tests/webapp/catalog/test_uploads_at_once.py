"""Uploads of one person at the same moment: together they stay within what may be stored and what may be open."""

import json
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connections
from django.test import Client
from pytest_django import Settings

from tests.webapp.conftest import make_person
from webapp.accounts.models import Scope
from webapp.accounts.tokens import create_token
from webapp.catalog import uploads
from webapp.catalog.files.stored import require_stored_room
from webapp.catalog.models import Dataset, Upload

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("headroom_home")]

NUM_BYTES = 6_000
ROOM_FOR_ONE = 10_000


@pytest.fixture
def client() -> Client:
    return Client(headers={"Authorization": f"Bearer {create_token(user=make_person('ada'), name='t', scope=Scope.WRITE)[1]}"})


def send_text(client: Client) -> Any:
    file = SimpleUploadedFile("a.txt", b"word " * (NUM_BYTES // 5))
    return client.post("/api/v1/datasets", {"name": "a text", "file": file})


def begin_upload(client: Client) -> Any:
    files = [{"name": "a.txt", "num_bytes": NUM_BYTES, "sha256": "0" * 64}]
    body = {"kind": "dataset", "name": "a text", "files": files}
    return client.post("/api/v1/uploads", json.dumps(body), content_type="application/json")


def ask_at_once(ask: Callable[[Client], Any], client: Client, *, times: int) -> list[Any]:
    begin = Barrier(times)

    def run() -> Any:
        begin.wait()
        try:
            return ask(client)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(times) as threads:
        return [asked.result() for asked in [threads.submit(run) for _ in range(times)]]


@pytest.mark.parametrize("setting", ["HEADROOM_MAX_STORED_BYTES_PER_PERSON", "HEADROOM_MAX_STORED_BYTES_PER_PROJECT"])
def test_of_two_uploads_at_once_with_room_for_one_the_other_is_refused(
    client: Client, settings: Settings, setting: str
) -> None:
    setattr(settings, setting, ROOM_FOR_ONE)
    answers = ask_at_once(send_text, client, times=2)
    assert sorted(answer.status_code for answer in answers) == [201, 409]
    refused = next(answer for answer in answers if answer.status_code == 409).json()
    assert (refused["code"], refused["extra"]["used_bytes"]) == ("storage_limit_reached", NUM_BYTES)
    assert Dataset.objects.filter(owner__username="ada").count() == 1


@pytest.mark.parametrize(
    "setting",
    ["HEADROOM_MAX_STORED_BYTES_PER_PERSON", "HEADROOM_MAX_STORED_BYTES_PER_PROJECT", "HEADROOM_MAX_OPEN_UPLOAD_BYTES"],
)
def test_of_uploads_that_begin_at_once_no_more_are_open_than_there_is_room_for(
    client: Client, settings: Settings, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_slowly(*args: Any, **kwargs: Any) -> None:
        require_stored_room(*args, **kwargs)
        time.sleep(0.3)  # all of them have looked before the first is written, unless they wait for one another

    monkeypatch.setattr(uploads, "require_stored_room", check_slowly)
    setattr(settings, setting, ROOM_FOR_ONE)
    answers = ask_at_once(begin_upload, client, times=4)
    assert Counter(answer.status_code for answer in answers) == {201: 1, 409: 3}
    assert Upload.objects.count() == 1
