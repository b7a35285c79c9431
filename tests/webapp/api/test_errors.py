"""Every error is problem+json with a code; nothing of the inside leaks."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Never

import pytest
from django.db import OperationalError, connection
from django.test import Client

from tests.worker.processes import wait_for
from webapp.api.routes import catalog as catalog_routes
from webapp.catalog.models import Dataset, Model
from webapp.http import idempotency
from webapp.jobs.models import IdempotencyKey, Job

PROBLEM_KEYS = {"type", "title", "status", "detail", "code", "fields", "hint"}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/api/v1/nothing", 404, "not_found"),
        ("GET", "/api/v1/", 404, "not_found"),
        ("POST", "/api/v1/nothing", 404, "not_found"),
        ("DELETE", "/api/v1/jobs", 405, "method_not_allowed"),
        ("PUT", "/api/v1/me", 405, "method_not_allowed"),
        ("POST", "/api/v1/plans", 400, "bad_request"),
    ],
)
def test_each_failure_is_a_problem_document(
    db: None, as_ada: Client, method: str, path: str, status: int, code: str
) -> None:
    response = as_ada.generic(method, path, data="not json", content_type="application/json")
    document = response.json()
    assert (response.status_code, document["status"], document["code"]) == (status, status, code)
    assert response["Content-Type"] == "application/problem+json"
    assert set(document) >= PROBLEM_KEYS


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"model": "\\ud800"}', "half a character"),
        ('{"model": {"a\\u0000": 1}}', "holds a NUL"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"seed": ' + "9" * 5_000 + "}", "a number has more than 4,300 digits"),
        ('{"a":', "line 1 column 6"),
        ('{"model": "gpt2", "model": "tiny"}', "the name 'model' occurs twice"),
        (json.dumps(dict.fromkeys(map(str, range(60_000)), 1)), "an object has 60,000 keys; allowed: at most 1,000"),
        (json.dumps({"a": [dict.fromkeys(map(str, range(900)), 1)] * 60}), "its objects have more than 20,000 keys"),
    ],
)
def test_a_body_that_cannot_be_kept_says_why(db: None, as_ada: Client, body: str, reason: str) -> None:
    response = as_ada.post("/api/v1/plans", data=body, content_type="application/json")
    assert (response.status_code, response.json()["code"]) == (400, "bad_request")
    assert reason in response.json()["detail"]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data", "x"),
        ("multipart/form-data; boundary=ü", "x"),
        (
            "multipart/form-data; boundary=b",
            "".join(f'--b\r\nContent-Disposition: form-data; name="f"; filename="{n}"\r\n\r\nx\r\n' for n in range(150)),
        ),
        (
            "multipart/form-data; boundary=b",
            "".join(f'--b\r\nContent-Disposition: form-data; name="f{n}"\r\n\r\nx\r\n' for n in range(1_500)),
        ),
    ],
)
def test_a_form_that_cannot_be_read_is_the_senders_fault(db: None, as_ada: Client, kind: str, body: str) -> None:
    response = as_ada.generic("POST", "/api/v1/models", data=body, content_type=kind)
    assert (response.status_code, response["Content-Type"]) == (400, "application/problem+json")
    assert "the form cannot be read" in response.json()["detail"]


@pytest.mark.parametrize("address", ["/api/v1/jobs/%00", "/api/v1/jobs?q=%00", "/api/v1/jobs?cursor=n.%00"])
def test_a_nul_in_an_address_is_refused_as_a_problem(db: None, as_ada: Client, address: str) -> None:
    response = as_ada.get(address)
    assert (response.status_code, response["Content-Type"]) == (400, "application/problem+json")
    assert response.json()["detail"] == "the address holds a NUL character"


def test_a_page_size_of_many_digits_is_refused(db: None, as_ada: Client) -> None:
    assert as_ada.get("/api/v1/jobs", {"page_size": "9" * 5_000}).status_code == 422


def test_a_wrong_method_names_those_that_work(as_ada: Client) -> None:
    response = as_ada.delete("/api/v1/jobs")
    assert set(response["Allow"].split(", ")) == {"GET", "POST"}
    assert response.json()["detail"] == f"DELETE is not possible here; allowed: {response['Allow']}"


def test_a_fault_of_the_program_reveals_nothing_of_itself(
    as_ada: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Never:
        raise RuntimeError("secret inside")

    monkeypatch.setattr(catalog_routes, "program_version", broken)
    response = as_ada.get("/api/v1/me")
    assert (response.status_code, response.json()["code"]) == (500, "internal")
    assert "secret inside" not in response.content.decode()
    assert "secret inside" in caplog.text


@pytest.mark.parametrize(
    ("spec", "field", "detail"),
    [
        (
            {"goal": {"device_budget_bytes": "6 gigs"}},
            "goal.device_budget_bytes",
            "write a number and one of B, KiB, MiB, GiB",
        ),
        ({"goal": {}}, "goal.device_budget_bytes", "goal.device_budget_bytes is missing"),
        (
            {"workload": {"num_steps": 0}},
            "workload.num_steps",
            "workload.num_steps is 0; allowed: an integer from 1 to 100,000,000",
        ),
        ({"workload": {"steps": 5}}, "workload.steps", "workload.steps is not a known field"),
        ({"workload": {"sequence_length": 128}}, "workload.sequence_length", "tiny has positions for 64 tokens"),
        (
            {"workload": {"mode": "finetune", "sequence_length": 32}},
            "workload.mode",
            "tiny has no weights, allowed: pretrain",
        ),
        ({"model": "nothing"}, "model", "model 'nothing' is not there; yours: tiny"),
        ({"model": 3}, "model", "model is 3; allowed: the id or name of a model"),
        ({"dataset": None}, "dataset", "dataset is None; allowed"),
        ({"plan": "best"}, "plan", "plan is 'best'; allowed: chosen, keep_all"),
        ({"colour": "red"}, "colour", "colour is not a known field; known: name, model, dataset, recipe, workload, goal, plan"),
        ({"name": "x" * 201}, "name", "1 to 200 printable characters"),
    ],
)
def test_a_bad_spec_names_the_field_the_value_and_what_is_allowed(
    as_ada: Client, model: Model, dataset: Dataset, spec: dict[str, Any], field: str, detail: str
) -> None:
    good = {
        "model": "tiny",
        "dataset": "text",
        "workload": {"sequence_length": 32, "num_steps": 5},
        "goal": {"device_budget_bytes": "100 MiB"},
    }
    response = as_ada.post("/api/v1/plans", data=json.dumps({**good, **spec}), content_type="application/json")
    document = response.json()
    assert response.status_code == 422
    assert document["fields"][0]["field"] == field
    assert detail in document["detail"]
    assert not Job.objects.filter(kind="train").exists()


def test_the_description_lists_every_address_and_its_page_is_served_from_here(db: None, as_nobody: Client) -> None:
    document = as_nobody.get("/api/v1/openapi.json").json()
    assert "/api/v1/jobs/{job_id}/events" in document["paths"]
    page = as_nobody.get("/api/v1/docs")
    assert page.status_code == 200
    assert b"/api/v1/plans" in page.content
    assert b"https://" not in page.content
    assert b"<style" not in page.content
    assert b"<script>" not in page.content
    # Redoc writes styles into the page; scripts from elsewhere or inside it stay forbidden, and other pages stay strict
    policy = {part.strip() for part in page["Content-Security-Policy"].split(";")}
    assert "style-src 'self' 'unsafe-inline'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe-inline" not in as_nobody.get("/login/")["Content-Security-Policy"]


def test_the_bodies_that_the_description_shows_are_taken(db: None, as_ada: Client) -> None:
    paths = as_ada.get("/api/v1/openapi.json").json()["paths"]
    shown = {
        path: operation["post"]["requestBody"]["content"]["application/json"]["example"]
        for path, operation in paths.items()
        if "example" in operation.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
    }
    assert set(shown) >= {"/api/v1/jobs", "/api/v1/plans", "/api/v1/jobs/{job_id}/cancel"}
    for path, body in shown.items():
        answer = as_ada.post(path.replace("{job_id}", "j_none"), data=json.dumps(body), content_type="application/json")
        # Nothing is there yet to train, and nothing to cancel among many; the body itself is right.
        taken = (200,) if path == "/api/v1/jobs/cancel" else (201, 202, 403, 404)
        wrong = [field["field"] for field in answer.json().get("fields", [])]
        assert answer.status_code in taken or wrong in (["model"], ["dataset"]), (path, answer.content)


def test_a_job_is_asked_for_as_a_plan_is_by_the_spec_alone(db: None, as_ada: Client) -> None:
    spec = {"name": "x", "model": "none-such", "dataset": "none", "workload": {}}
    answers = [
        as_ada.post("/api/v1/jobs", data=json.dumps(body), content_type="application/json").json()
        for body in (spec, {"spec": spec})
    ]
    assert answers[0] == answers[1]
    assert answers[0]["code"] != "bad_request"


def test_health_is_reported_with_and_without_redis(db: None, as_nobody: Client) -> None:
    assert as_nobody.get("/healthz").status_code == 200
    response = as_nobody.get("/readyz")
    assert (response.status_code, response.json()["database"]) == (200, "ok")
    assert response.json()["redis"].startswith("unreachable")


def send_text(client: Client, content: str = "a word\n", key: str = "k1", name: str = "words") -> Any:
    from django.core.files.uploadedfile import SimpleUploadedFile

    file = SimpleUploadedFile("words.txt", content.encode())
    return client.post("/api/v1/datasets", data={"name": name, "file": file}, headers={"Idempotency-Key": key})


def test_the_same_key_and_request_replay_the_same_answer(as_ada: Client) -> None:
    first, second = send_text(as_ada), send_text(as_ada)
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.json() == second.json()
    assert second["Location"] == first["Location"]
    assert second["Idempotent-Replayed"] == "true"


def test_the_same_key_with_another_request_is_refused(as_ada: Client) -> None:
    send_text(as_ada)
    response = send_text(as_ada, content="another word\n")
    assert (response.status_code, response.json()["code"]) == (422, "idempotency_key_reused")


def test_the_same_key_while_the_first_runs_is_a_conflict(as_ada: Client) -> None:
    send_text(as_ada)
    IdempotencyKey.objects.update(status=None)
    response = send_text(as_ada)
    assert (response.status_code, response.json()["code"]) == (409, "idempotency_in_progress")


@pytest.mark.parametrize("lives", [True, False])
def test_a_key_is_free_once_the_process_that_held_it_was_killed(as_ada: Client, headroom_home: Path, lives: bool) -> None:
    code = (
        "import django, sys; from django.conf import settings; settings.configure(HEADROOM_HOME=sys.argv[1]); "
        "from webapp.http.process_lock import this_process; print(this_process(), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(headroom_home)]
    root = Path(__file__).resolve().parents[3]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as web:
        holder = web.stdout.readline().strip()
        send_text(as_ada)
        IdempotencyKey.objects.update(status=None, holder=holder)
        Dataset.objects.all().delete()
        if not lives:
            web.kill()
            web.wait()
        assert send_text(as_ada).status_code == (409 if lives else 201)
        web.kill()


def test_a_refused_request_may_be_sent_again_under_its_key(as_ada: Client) -> None:
    assert send_text(as_ada, content="").status_code == 422
    assert send_text(as_ada).status_code == 201


def test_a_request_that_fails_while_the_database_is_lost_may_be_sent_again_soon(
    transactional_db: None, as_ada: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key was once held for ten minutes by a process that lived on."""

    def refuse(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith(("DELETE", 'INSERT INTO "catalog_dataset"')):
            raise OperationalError("database is locked")
        return execute(sql, *rest)

    monkeypatch.setattr(idempotency, "TRIED_AGAIN_S", 0.05)
    with connection.execute_wrapper(refuse):
        assert send_text(as_ada).status_code == 503
        assert IdempotencyKey.objects.count() == 1
    wait_for(lambda: not IdempotencyKey.objects.exists(), what="the key to be free")
    assert send_text(as_ada).status_code == 201


def test_keys_of_two_people_do_not_meet(as_ada: Client, as_eve: Client) -> None:
    assert send_text(as_ada).json()["id"] != send_text(as_eve).json()["id"]


def test_the_web_process_never_imports_torch(headroom_home: Path) -> None:
    code = (
        "import os, sys, django; os.environ['DJANGO_SETTINGS_MODULE'] = 'tests.settings'; import webapp.asgi; "
        "from webapp.planning import pricing; from django.urls import get_resolver; get_resolver().url_patterns; "
        "import optimizer.search.search; "
        "print(sorted({'torch', 'transformers', 'bitsandbytes'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("path", "unknown"),
    [("/api/v1/jobs?limt=1", "limt"), ("/api/v1/models?state=done", "state")],
)
def test_a_parameter_that_no_route_reads_is_refused_by_name(db: None, as_ada: Client, path: str, unknown: str) -> None:
    response = as_ada.get(path)
    assert response.status_code == 422
    (field,) = response.json()["fields"]
    assert field["field"] == unknown
    assert unknown not in field["allowed"]


def test_a_refusal_of_many_unknown_fields_names_the_first_of_them_alone(db: None, as_ada: Client) -> None:
    body = json.dumps({"spec": {}, **dict.fromkeys(map(str, range(900)), 1)})
    response = as_ada.post("/api/v1/jobs", data=body, content_type="application/json")
    assert (response.status_code, len(response.json()["fields"])) == (422, 50)
    assert len(response.content) < 20_000
