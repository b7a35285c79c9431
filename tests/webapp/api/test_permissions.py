"""Every address of the API as nobody, as someone else, with an expired token. A new address without a case here fails."""

import re

import pytest
from django.test import Client
from django.utils import timezone

from webapp.accounts.models import ApiToken
from webapp.accounts.tokens import create_token
from webapp.api.api import openapi_document
from webapp.jobs.models import Artifact, Job

OPERATIONS = sorted(
    (method.upper(), path) for path, methods in openapi_document()["paths"].items() for method in methods
)
OPEN_TO_ALL_SIGNED_IN = {
    ("GET", "/api/v1/me"),
    ("GET", "/api/v1/models"),
    ("GET", "/api/v1/datasets"),
    ("GET", "/api/v1/machines"),
    ("GET", "/api/v1/jobs"),
    ("GET", "/api/v1/compare"),
    ("GET", "/api/v1/queue"),
    ("POST", "/api/v1/models"),
    ("POST", "/api/v1/datasets"),
    ("POST", "/api/v1/plans"),
    ("POST", "/api/v1/plans/best"),
    ("POST", "/api/v1/plans/compare"),
    ("POST", "/api/v1/plans/cards"),
    ("POST", "/api/v1/plans/price"),
    ("POST", "/api/v1/estimates"),
    ("POST", "/api/v1/jobs"),
}
"""Addresses that name no row; what they list or take is the caller's own (tested elsewhere)."""


@pytest.fixture
def addresses(ada, make_job):
    """Each path with ids of ada's own rows in it."""
    from tests.webapp.conftest import make_text, make_tiny_model

    job = make_job()
    Job.objects.filter(pk=job.pk).update(attempt=1)
    artifact = Artifact.objects.create(job=job, kind="model", name="model", file="jobs/x", num_bytes=1, sha256="0" * 64)
    ids = {
        "job_id": job.pk,
        "artifact_id": artifact.pk,
        "model_id": make_tiny_model(ada).pk,
        "dataset_id": make_text(ada).pk,
    }
    return lambda path: re.sub(r"\{(\w+)\}", lambda match: ids[match.group(1)], path)


def ask(client, method, path):
    body = {"data": "{}", "content_type": "application/json"} if method == "POST" else {}
    return client.generic(method, path, **body)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_nobody_gets_in(addresses, as_nobody, method, path):
    response = ask(as_nobody, method, addresses(path))
    assert (response.status_code, response.json()["code"]) == (401, "unauthorized")
    assert response["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_an_expired_token_is_nobody_even_beside_a_good_session(addresses, ada, method, path):
    row, text = create_token(user=ada, name="old")
    ApiToken.objects.filter(pk=row.pk).update(expires_at=timezone.now())
    client = Client(headers={"Authorization": f"Bearer {text}"}, raise_request_exception=False)
    client.force_login(ada)
    assert ask(client, method, addresses(path)).status_code == 401


@pytest.mark.parametrize(("method", "path"), [one for one in OPERATIONS if one not in OPEN_TO_ALL_SIGNED_IN])
def test_what_is_someone_elses_is_not_there(addresses, as_eve, method, path):
    response = ask(as_eve, method, addresses(path))
    assert (response.status_code, response.json()["code"]) == (404, "not_found")
    there_is_none = re.sub(r"_[0-9a-f]{32}", "_" + "0" * 32, addresses(path))
    assert ask(as_eve, method, there_is_none).json() == response.json()


@pytest.mark.parametrize(("method", "path"), sorted(OPEN_TO_ALL_SIGNED_IN))
def test_lists_and_makers_let_the_signed_in_in(db, as_eve, method, path):
    assert ask(as_eve, method, path).status_code in (200, 422)


def test_a_session_needs_its_csrf_token_to_change_anything_and_none_to_read(ada, make_job):
    client = Client(enforce_csrf_checks=True)
    client.force_login(ada)
    job = make_job()
    assert client.get(f"/api/v1/jobs/{job.pk}").status_code == 200
    address, json_type = f"/api/v1/jobs/{job.pk}/cancel", "application/json"
    response = client.post(address, content_type=json_type)
    assert (response.status_code, response.json()["code"]) == (403, "csrf_failed")
    client.cookies["csrftoken"] = "a" * 32
    response = client.post(address, content_type=json_type, headers={"X-CSRFToken": "a" * 32})
    assert response.status_code == 202


def test_an_administrator_sees_all_jobs(admin, make_job):
    client = Client()
    client.force_login(admin)
    assert client.get(f"/api/v1/jobs/{make_job().pk}").status_code == 200
