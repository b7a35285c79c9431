"""Jobs over the API: lists, moves, files, errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import AsyncClient, Client
from pytest_django import Settings

from tests.webapp.conftest import make_spec
from webapp.accounts.models import Membership, Role
from webapp.accounts.tokens import create_token
from webapp.attempts.claiming import claim_job
from webapp.attempts.outcome import finish_attempt
from webapp.attempts.records import record_samples, record_started
from webapp.catalog.models import Dataset, Machine, Model
from webapp.jobs.actions import cancel_job
from webapp.jobs.models import Artifact, Job

JOB_KEYS = """id name kind state phase reason message error is_terminal cancel_requested paused priority attempt step num_steps
eta_s summary tags notes project spec plan prediction machine created_at started_at finished_at links"""


def post(client: Client, path: str, body: dict[str, Any] | None = None, **headers: Any) -> Any:
    return client.post(f"/api/v1/{path}", data=json.dumps(body or {}), content_type="application/json", headers=headers)


def test_below_the_floor_of_free_disk_no_job_is_accepted_nor_retried(
    as_ada: Client, make_job: Callable[..., Job], settings: Settings
) -> None:
    job = make_job()
    cancel_job(job, mode="discard", actor="user:ada")
    settings.HEADROOM_DISK_FLOOR_BYTES = 2**60
    for answer in (post(as_ada, "jobs", {"spec": {}}), post(as_ada, f"jobs/{job.pk}/retry")):
        assert (answer.status_code, answer.json()["code"]) == (507, "disk_full")
        assert answer.json()["detail"].endswith("free; nothing new is accepted below 1048576 TiB")
    assert Job.objects.count() == 1


def test_a_job_shows_exactly_what_the_contract_lists(as_ada: Client, make_job: Callable[..., Job]) -> None:
    document = as_ada.get(f"/api/v1/jobs/{make_job().pk}").json()
    assert sorted(document) == sorted(JOB_KEYS.split())
    assert document["machine"] == "bench"
    assert document["created_at"].endswith("Z")


def test_pages_follow_each_other_by_cursor_without_loss(as_ada: Client, make_job: Callable[..., Job]) -> None:
    made = [make_job().pk for _ in range(5)]
    page = as_ada.get("/api/v1/jobs?page_size=2").json()
    seen = [row["id"] for row in page["results"]]
    assert page["previous"] is None
    while page["next"]:
        page = as_ada.get(page["next"]).json()
        seen += [row["id"] for row in page["results"]]
    assert seen == sorted(made, reverse=True)
    back = as_ada.get(page["previous"]).json()
    assert [row["id"] for row in back["results"]] == seen[2:4]


@pytest.mark.parametrize(
    ("query", "field"),
    [("page_size=0", "page_size"), ("page_size=x", "page_size"), ("cursor=zzz", "cursor"), ("state=odd", "state")],
)
def test_a_bad_list_parameter_is_named(as_ada: Client, query: str, field: str) -> None:
    response = as_ada.get(f"/api/v1/jobs?{query}")
    assert (response.status_code, response["Content-Type"]) == (422, "application/problem+json")
    assert response.json()["fields"][0]["field"] == field


def test_jobs_are_found_by_state_and_name(
    as_ada: Client, make_job: Callable[..., Job], model: Model, dataset: Dataset
) -> None:
    make_job()
    other = make_job(spec=make_spec(model, dataset, name="needle"))
    post(as_ada, f"jobs/{other.pk}/cancel")
    assert [row["id"] for row in as_ada.get("/api/v1/jobs?state=cancelled,failed").json()["results"]] == [other.pk]
    assert [row["id"] for row in as_ada.get("/api/v1/jobs?q=NEED").json()["results"]] == [other.pk]


def test_cancel_is_202_then_200_then_409(as_ada: Client, make_job: Callable[..., Job], machine: Machine) -> None:
    job = make_job()
    attempt = claim_job(worker="w", machine=machine)
    assert post(as_ada, f"jobs/{job.pk}/cancel", {"mode": "save"}).status_code == 202
    assert post(as_ada, f"jobs/{job.pk}/cancel", {"mode": "save"}).status_code == 200
    finish_attempt(attempt, result=None, exit_code=-15)
    response = post(as_ada, f"jobs/{job.pk}/cancel")
    assert (response.status_code, response.json()["code"]) == (409, "wrong_state")
    assert (
        response.json()["detail"]
        == f"cannot cancel job {job.pk}: it is cancelled; allowed: queued, starting or running"
    )


def test_an_unknown_cancel_mode_is_refused_by_name(as_ada: Client, make_job: Callable[..., Job]) -> None:
    response = post(as_ada, f"jobs/{make_job().pk}/cancel", {"mode": "maybe"})
    assert response.status_code == 422
    field = response.json()["fields"][0]
    assert (field["field"], field["value"]) == ("mode", "maybe")
    assert "save" in field["message"]


def test_pause_resume_and_retry_answer_202_and_409_in_the_wrong_state(
    as_ada: Client, make_job: Callable[..., Job]
) -> None:
    job = make_job()
    statuses = [
        post(as_ada, f"jobs/{job.pk}/{move}").status_code
        for move in ("resume", "pause", "pause", "resume", "retry", "cancel")
    ]
    assert statuses == [409, 202, 409, 202, 409, 202]
    retried = post(as_ada, f"jobs/{job.pk}/retry")
    assert (retried.status_code, retried["Location"]) == (202, f"/api/v1/jobs/{retried.json()['id']}")
    assert retried.json()["id"] != job.pk


def test_metrics_hold_the_latest_attempts_points_and_the_highest_peaks(
    as_ada: Client, make_job: Callable[..., Job], machine: Machine
) -> None:
    job = make_job()
    attempt = claim_job(worker="w", machine=machine)
    peaks = {step: 1000 if step == 57 else 10 for step in range(1, 201)}
    record_samples(
        attempt,
        [
            {"kind": "step", "attempt": 1, "step": step, "loss": 1.0, "device_peak_bytes": peak}
            for step, peak in peaks.items()
        ],
    )
    record_samples(attempt, [{"kind": "eval", "attempt": 1, "step": 0, "validation_loss": 3.0}])
    record_samples(attempt, [{"kind": "timeline", "attempt": 1, "step": 5, "points": [[0.0, {"weights": 1}]]}])
    document = as_ada.get(f"/api/v1/jobs/{job.pk}/metrics?max_points=20").json()
    steps = [record["step"] for record in document["steps"]]
    assert 57 in steps
    assert steps[-1] == 200
    assert len(steps) <= 20
    assert steps == sorted(steps)
    assert document["evals"][0]["validation_loss"] == 3.0
    assert document["timeline"]["points"] == [[0.0, {"weights": 1}]]


@pytest.mark.django_db(transaction=True)
def test_events_list_every_move_in_order(as_ada: Client, make_job: Callable[..., Job], machine: Machine) -> None:
    job = make_job()
    record_started(claim_job(worker="w", machine=machine), pid=1)
    rows = as_ada.get(f"/api/v1/jobs/{job.pk}/events").json()["results"]
    assert [(row["seq"], row["kind"], row["to_state"]) for row in rows] == [
        (1, "created", "queued"),
        (2, "claimed", "starting"),
        (3, "started", "running"),
    ]


@pytest.mark.django_db(transaction=True)
async def test_files_come_as_attachments_with_safe_names(headroom_home: Path) -> None:
    from asgiref.sync import sync_to_async

    from tests.webapp.conftest import make_bench, make_person, make_text, make_tiny_model
    from webapp.jobs.actions import create_job
    from webapp.live.record import from_database

    def prepare() -> tuple[str, Job, Artifact, Artifact]:
        ada, model, dataset, machine = make_person("ada"), make_tiny_model(), make_text(), make_bench()
        job = create_job(
            owner=ada, spec=make_spec(model, dataset), model=model, dataset=dataset,
            plan=None, prediction=None, machine=machine, actor="user:ada",
        )  # fmt: skip
        Job.objects.filter(pk=job.pk).update(attempt=2)
        folder = headroom_home / "jobs" / job.pk
        for number in (1, 2):
            (folder / "attempts" / str(number)).mkdir(parents=True)
            (folder / "attempts" / str(number) / "log.txt").write_text(f"log of {number}\n")
        (folder / "out.bin").write_bytes(b"w" * 200_000)
        good = Artifact.objects.create(
            job=job,
            kind="model",
            name='../we"ird\n名.bin',
            file=f"jobs/{job.pk}/out.bin",
            num_bytes=200_000,
            sha256="0" * 64,
        )
        (folder / "link").symlink_to("/etc/passwd")
        bad = Artifact.objects.create(
            job=job, kind="model", name="b", file=f"jobs/{job.pk}/link", num_bytes=1, sha256="0" * 64
        )
        return create_token(user=ada, name="t")[1], job, good, bad

    token, job, good, bad = await from_database(prepare)
    client, signed_in = AsyncClient(), {"Authorization": f"Bearer {token}"}
    response: Any = await client.get(f"/api/v1/artifacts/{good.pk}/download", headers=signed_in)
    assert response.status_code == 200, response.content
    body = b"".join([part async for part in response.streaming_content])
    assert body == b"w" * 200_000
    assert response["Content-Length"] == "200000"
    assert response["Content-Type"] == "application/octet-stream"
    assert response["X-Content-Type-Options"] == "nosniff"
    assert response["Content-Disposition"].startswith("attachment; filename")
    assert "/" not in response["Content-Disposition"].replace("utf-8''", "")
    assert "\n" not in response["Content-Disposition"]
    assert (await client.get(f"/api/v1/artifacts/{bad.pk}/download", headers=signed_in)).status_code == 404
    logs: Any = await client.get(f"/api/v1/jobs/{job.pk}/logs", headers=signed_in)
    assert b"".join([part async for part in logs.streaming_content]) == b"log of 1\nlog of 2\n"
    await sync_to_async(close_connections)()


def close_connections() -> None:
    from django.db import connections

    connections.close_all()


def outcomes_of(answer: Any) -> dict[str, str]:
    assert answer.status_code == 200, answer.content
    return {row["id"]: row["outcome"] for row in answer.json()["results"]}


def test_many_jobs_are_cancelled_by_one_request_with_an_answer_for_each(
    as_ada: Client, as_eve: Client, make_job: Callable[..., Job], machine: Machine
) -> None:
    ended, running, waiting = make_job(), make_job(), make_job()
    cancel_job(ended, mode="discard", actor="user:ada")
    assert claim_job(worker="w", machine=machine, job_id=running.pk) is not None
    ids = [ended.pk, running.pk, waiting.pk, "job_nobodys"]
    assert outcomes_of(post(as_eve, "jobs/cancel", {"ids": ids})) == dict.fromkeys(ids, "not_found")
    answers = outcomes_of(post(as_ada, "jobs/cancel", {"ids": ids, "mode": "keep"}))
    assert answers == dict(zip(ids, ["ended", "asked_to_stop", "cancelled", "not_found"], strict=True))
    again = outcomes_of(post(as_ada, "jobs/cancel", {"ids": ids[1:3], "mode": "keep"}))
    assert again == {running.pk: "already_asked", waiting.pk: "ended"}
    assert outcomes_of(post(as_ada, "jobs/cancel", {"ids": [running.pk], "mode": "discard"})) == {running.pk: "asked_to_stop"}
    running.refresh_from_db()
    waiting.refresh_from_db()
    assert (running.state, running.cancel_mode) == ("starting", "discard")
    assert (waiting.state, waiting.reason, waiting.cancel_mode) == ("cancelled", "cancelled_by_user", "keep")
    assert [(event.seq, event.kind, event.actor) for event in waiting.events.all()] == [
        (1, "created", "user:ada"),
        (2, "cancelled", "user:ada"),
    ]
    assert [event.kind for event in running.events.all()] == ["created", "claimed", "cancel_requested", "cancel_requested"]


def test_who_may_only_look_cancels_none_of_many(
    admin: User, as_eve: Client, eve: User, make_job: Callable[..., Job]
) -> None:
    job = make_job()
    Membership.objects.create(project=job.project, user=eve, role=Role.VIEWER)
    assert outcomes_of(post(as_eve, "jobs/cancel", {"ids": [job.pk]})) == {job.pk: "forbidden"}
    assert outcomes_of(post(as_eve, "jobs/cancel", {"state": ["queued"]})) == {job.pk: "forbidden"}
    job.refresh_from_db()
    assert job.state == "queued"


def test_jobs_are_cancelled_by_state_and_tag(as_ada: Client, make_job: Callable[..., Job]) -> None:
    tagged, other = make_job(), make_job()
    Job.objects.filter(pk=tagged.pk).update(tags=["sweep"])
    assert outcomes_of(post(as_ada, "jobs/cancel", {"tag": "sweep", "mode": "discard"})) == {tagged.pk: "cancelled"}
    assert outcomes_of(post(as_ada, "jobs/cancel", {"state": ["running"]})) == {}
    assert outcomes_of(post(as_ada, "jobs/cancel", {"state": ["queued"]})) == {other.pk: "cancelled"}


@pytest.mark.parametrize("body", [{}, {"mode": "save"}, {"ids": []}, {"ids": ["job_a"], "tag": "x"}, {"state": ["failed"]}])
def test_a_request_that_does_not_say_which_jobs_cancels_none(
    as_ada: Client, make_job: Callable[..., Job], body: dict[str, Any]
) -> None:
    job = make_job()
    answer = post(as_ada, "jobs/cancel", body)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_input")
    job.refresh_from_db()
    assert job.state == "queued"


def test_cancelling_more_jobs_takes_no_more_statements(
    as_ada: Client, make_job: Callable[..., Job], django_assert_max_num_queries: Any
) -> None:
    made = [make_job().pk for _ in range(40)]
    with django_assert_max_num_queries(40):
        assert set(outcomes_of(post(as_ada, "jobs/cancel", {"ids": made})).values()) == {"cancelled"}
