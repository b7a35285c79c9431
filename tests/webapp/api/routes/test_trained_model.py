"""``POST /jobs/{id}/model``: of what a run left a model, as the API answers it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from tests.webapp.api.routes.test_jobs import post
from tests.webapp.conftest import make_tiny_model
from tests.webapp.exported import ADAPTER, leave
from webapp.accounts.models import AuditRecord
from webapp.accounts.projects import set_member
from webapp.catalog.models import Model
from webapp.jobs.models import Job


@pytest.fixture
def job(make_job: Callable[..., Job], headroom_home: Path) -> Job:
    return leave(make_job(), headroom_home)


def refusal(answer: Any) -> tuple[int, str]:
    assert answer["Content-Type"] == "application/problem+json"
    document = answer.json()
    assert document["hint"]
    return answer.status_code, document["code"]


def test_it_is_answered_as_a_model_that_was_sent(as_ada: Client, job: Job) -> None:
    answer = post(as_ada, f"jobs/{job.pk}/model", {"name": "mine"})
    assert answer.status_code == 201
    made = answer.json()
    assert answer["Location"] == f"/api/v1/models/{made['id']}"
    assert (made["name"], made["from_job"], made["has_weights"], made["project"]) == ("mine", job.pk, True, job.project_id)
    assert {**as_ada.get(answer["Location"]).json(), **made} == as_ada.get(answer["Location"]).json()


def test_without_a_body_it_has_the_job_s_name(as_ada: Client, job: Job) -> None:
    answer = as_ada.generic("POST", f"/api/v1/jobs/{job.pk}/model", content_type="application/json")
    assert answer.json()["name"] == job.name


def test_a_model_that_was_sent_comes_of_no_job(as_ada: Client, model: Model) -> None:
    assert as_ada.get(f"/api/v1/models/{model.pk}").json()["from_job"] is None


def test_a_job_says_where(as_ada: Client, job: Job) -> None:
    assert as_ada.get(f"/api/v1/jobs/{job.pk}").json()["links"]["model"] == f"/api/v1/jobs/{job.pk}/model"


def test_the_same_key_makes_one_model(as_ada: Client, job: Job) -> None:
    answers = [post(as_ada, f"jobs/{job.pk}/model", **{"Idempotency-Key": "k"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[0].json() == answers[1].json()
    assert answers[1]["Idempotent-Replayed"] == "true"
    assert Model.objects.filter(from_job_id=job.pk).count() == 1


def test_again_it_says_which_model_it_is(as_ada: Client, job: Job) -> None:
    made = post(as_ada, f"jobs/{job.pk}/model").json()
    answer = post(as_ada, f"jobs/{job.pk}/model")
    assert refusal(answer) == (409, "model_exists")
    assert answer.json()["extra"] == {"model_id": made["id"]}


def test_a_name_that_is_taken_is_refused(as_ada: Client, ada: User, job: Job) -> None:
    make_tiny_model(ada, name="mine")
    assert refusal(post(as_ada, f"jobs/{job.pk}/model", {"name": "mine"})) == (409, "model_exists")


def test_a_job_that_goes_on_is_refused(as_ada: Client, make_job: Callable[..., Job]) -> None:
    assert refusal(post(as_ada, f"jobs/{make_job().pk}/model")) == (409, "wrong_state")


def test_adapters_alone_are_refused(as_ada: Client, make_job: Callable[..., Job], headroom_home: Path) -> None:
    job = leave(make_job(), headroom_home, model=None, adapter=ADAPTER)
    assert refusal(post(as_ada, f"jobs/{job.pk}/model")) == (409, "no_model")


def test_files_that_are_gone_are_reported(as_ada: Client, job: Job, headroom_home: Path) -> None:
    (headroom_home / "jobs" / job.pk / "artifacts" / "model" / "config.json").unlink()
    assert refusal(post(as_ada, f"jobs/{job.pk}/model")) == (409, "files_lost")


@pytest.mark.parametrize("body", [{"name": 3}, {"nam": "x"}, {"name": "a\u202eb"}])
def test_a_wrong_body_is_refused(as_ada: Client, job: Job, body: dict[str, Any]) -> None:
    assert post(as_ada, f"jobs/{job.pk}/model", body).status_code == 422


def test_somebody_else_s_job_is_not_there(as_eve: Client, job: Job) -> None:
    assert post(as_eve, f"jobs/{job.pk}/model").status_code == 404


def test_a_viewer_is_refused_and_a_member_makes_it(as_eve: Client, job: Job) -> None:
    set_member(job.project, username="eve", role="viewer")
    assert post(as_eve, f"jobs/{job.pk}/model").status_code == 403
    set_member(job.project, username="eve", role="member")
    made = post(as_eve, f"jobs/{job.pk}/model")
    assert (made.status_code, made.json()["project"]) == (201, job.project_id)


def test_it_is_in_the_audit_trail(as_ada: Client, job: Job) -> None:
    made = post(as_ada, f"jobs/{job.pk}/model").json()
    row = AuditRecord.objects.get(action="model.create")
    assert (row.actor, row.target, row.detail, row.project_id) == ("ada", made["id"], job.name, job.project_id)
