"""Bursts of submissions, and a database that is busy: a short line, then 503 with Retry-After; never 500."""

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from pytest_django import Settings

from webapp import submissions
from webapp.jobs.models import Job
from webapp.server import server_config
from webapp.submissions import BURST, LONGEST_WAIT_S, MOST_BACK_PER_S, SubmissionLine


class Slow:
    """Stands where Django stands: answers once it is let."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.num_at_once = self.most_at_once = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        await self.may_answer.wait()
        self.num_at_once -= 1
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


async def ask(line: SubmissionLine, path: str = "/api/v1/jobs", method: str = "POST") -> tuple[int, dict[bytes, bytes], Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await line({"type": "http", "method": method, "path": path}, None, send)
    return sent[0]["status"], dict(sent[0]["headers"]), json.loads(sent[1]["body"])


async def test_a_burst_waits_in_a_short_line_and_past_it_is_refused_at_once(settings: Settings) -> None:
    settings.HEADROOM_SUBMISSIONS_AT_ONCE, settings.HEADROOM_SUBMISSIONS_WAITING = 2, 3
    django = Slow()
    line = SubmissionLine(django)
    taken = [asyncio.create_task(ask(line)) for _ in range(5)]
    await asyncio.sleep(0)
    for path in ("/api/v1/jobs", "/api/v1/jobs/job_1/cancel"):
        status, headers, document = await ask(line, path)
        assert (status, headers[b"retry-after"], document["code"]) == (503, b"1", "overloaded")
        assert document["detail"] == "2 submissions are being taken and 3 wait; allowed: no more at once"
    django.may_answer.set()
    assert [status for status, _, _ in await asyncio.gather(*taken)] == [201] * 5
    assert django.most_at_once == 2
    assert (await ask(line))[0] == 201


def test_who_is_asked_back_still_has_a_connection_then() -> None:
    config = server_config(None, host="127.0.0.1", port=0)
    assert config.timeout_keep_alive > LONGEST_WAIT_S


async def test_those_refused_together_are_asked_back_in_different_seconds(settings: Settings) -> None:
    settings.HEADROOM_SUBMISSIONS_AT_ONCE, settings.HEADROOM_SUBMISSIONS_WAITING = 1, 0
    django = Slow()
    line = SubmissionLine(django)
    taken = asyncio.create_task(ask(line))
    await asyncio.sleep(0)
    back: list[int] = [int((await ask(line))[1][b"retry-after"]) for _ in range(MOST_BACK_PER_S * 2 * LONGEST_WAIT_S)]
    assert back[0] == 1
    assert set(back[: MOST_BACK_PER_S * LONGEST_WAIT_S]) == set(range(1, LONGEST_WAIT_S + 1))
    # a second of the clock may begin while they are refused: then one more is filled, and an earlier one has passed
    num_back = Counter(back)
    assert all(num_back[wait_s] <= 3 * MOST_BACK_PER_S for wait_s in range(1, LONGEST_WAIT_S + 1))
    django.may_answer.set()
    await taken


async def test_no_submission_begins_while_a_burst_is_refused(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.HEADROOM_SUBMISSIONS_AT_ONCE, settings.HEADROOM_SUBMISSIONS_WAITING = 1, 1
    monkeypatch.setattr(submissions, "BURST_S", 3600.0)
    monkeypatch.setattr(submissions, "QUIET_S", 0.5)
    began: list[str] = []
    first_may_end = asyncio.Event()

    async def django(scope: Any, receive: Any, send: Any) -> None:
        began.append(scope["path"])
        await first_may_end.wait()
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    line = SubmissionLine(django)
    taken = [asyncio.create_task(ask(line, path)) for path in ("/api/v1/jobs", "/api/v1/jobs/job_1/cancel")]
    await asyncio.sleep(0)
    refused = [await ask(line) for _ in range(BURST)]
    first_may_end.set()
    await taken[0]
    for _ in range(5):
        await asyncio.sleep(0)
    assert began == ["/api/v1/jobs"]
    assert [status for status, _, _ in refused] == [503] * BURST
    await taken[1]
    assert began == ["/api/v1/jobs", "/api/v1/jobs/job_1/cancel"]


async def test_what_is_no_submission_waits_in_no_line(settings: Settings) -> None:
    settings.HEADROOM_SUBMISSIONS_AT_ONCE, settings.HEADROOM_SUBMISSIONS_WAITING = 1, 0
    django = Slow()
    line = SubmissionLine(django)
    taken = [asyncio.create_task(ask(line, path, "GET")) for path in ("/api/v1/jobs", "/api/v1/queue", "/")]
    await asyncio.sleep(0)
    assert django.most_at_once == 3
    django.may_answer.set()
    await asyncio.gather(*taken)


async def test_who_gives_up_in_the_line_leaves_it(settings: Settings) -> None:
    settings.HEADROOM_SUBMISSIONS_AT_ONCE, settings.HEADROOM_SUBMISSIONS_WAITING = 1, 1
    django = Slow()
    line = SubmissionLine(django)
    first, second = asyncio.create_task(ask(line)), asyncio.create_task(ask(line))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.sleep(0)
    third = asyncio.create_task(ask(line))
    django.may_answer.set()
    assert ((await first)[0], (await third)[0]) == (201, 201)


@pytest.fixture
def a_writer_that_stays(transactional_db: None, is_postgresql: bool) -> Iterator[None]:
    """Another process's write that does not end, and a web process that waits a tenth of a second for it."""
    if is_postgresql:
        pytest.skip("PostgreSQL has no one writer")
    options = connection.settings_dict["OPTIONS"]
    before, options["timeout"] = options["timeout"], 0.1
    connection.close()
    writer = sqlite3.connect(connection.settings_dict["NAME"], isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    yield
    writer.rollback()
    writer.close()
    options["timeout"] = before
    connection.close()


@pytest.fixture
def queued(transactional_db: None, make_job: Any) -> Job:
    return make_job()


@pytest.mark.parametrize("key", ["", "k1"])
def test_a_busy_database_answers_503_with_retry_after_and_reads_go_on(
    queued: Job, as_ada: Client, a_writer_that_stays: None, key: str
) -> None:
    headers = {"Idempotency-Key": key} if key else {}
    refused = as_ada.post(f"/api/v1/jobs/{queued.pk}/pause", headers=headers)
    assert (refused.status_code, refused["Retry-After"], refused.json()["code"]) == (503, "2", "database_busy")
    assert as_ada.get(f"/api/v1/jobs/{queued.pk}").json()["paused"] is False
