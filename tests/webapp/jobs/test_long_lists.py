"""Lists over many jobs: as many queries as over few, and no large document among the columns."""

import re
from collections.abc import Callable

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from webapp.ids import new_job_id
from webapp.jobs.models import Job

pytestmark = pytest.mark.django_db
LARGE = re.compile(r'(?:SELECT|,) ("jobs_job"\."(?:spec|plan|prediction)"|"catalog_model"\."config"|"[a-z_]+"\."calibration")')
ADDRESSES = ("/api/v1/queue", "/api/v1/jobs", "/jobs/", "/search/", "/metrics", "/")


def fill(make_job: Callable[..., Job], count: int) -> None:
    """More copies of one queued job, written at once."""
    job = make_job()
    values = {field.attname: getattr(job, field.attname) for field in Job._meta.fields}
    Job.objects.bulk_create(Job(**{**values, "id": new_job_id(), "turn": 2 + index}) for index in range(count))


def ask(client: Client, path: str) -> list[str]:
    with CaptureQueriesContext(connection) as captured:
        assert client.get(path, follow=True).status_code == 200
    return [query["sql"] for query in captured.captured_queries]


@pytest.fixture
def as_admin(ada: User) -> Client:
    ada.is_superuser = True
    ada.save()
    client = Client()
    client.force_login(ada)
    return client


@pytest.mark.parametrize("path", ADDRESSES)
def test_a_list_costs_the_same_queries_however_many_jobs_wait(
    path: str, make_job: Callable[..., Job], as_admin: Client
) -> None:
    fill(make_job, 60)
    few = ask(as_admin, path)
    fill(make_job, 140)
    many = ask(as_admin, path)
    assert len(many) == len(few) <= 30


@pytest.mark.parametrize(("kind", "index"), [("model", "job_of_model"), ("dataset", "job_of_dataset")])
def test_the_latest_jobs_of_a_model_or_dataset_are_found_by_an_index_and_read_without_documents(
    kind: str, index: str, make_job: Callable[..., Job], as_admin: Client
) -> None:
    fill(make_job, 30)
    row = getattr(Job.objects.latest("id"), kind)
    statements = ask(as_admin, f"/{kind}s/{row.pk}/")
    assert [found.group(1) for sql in statements for found in LARGE.finditer(sql) if "jobs_job" in found.group(1)] == []
    lookups = [sql for sql in statements if 'ORDER BY "jobs_job"."id" DESC' in sql]
    assert len(lookups) == 1
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN {'QUERY PLAN ' if connection.vendor == 'sqlite' else ''}{lookups[0]}")
        plan = " ".join(str(line) for line in cursor.fetchall())
    if connection.vendor == "sqlite":
        assert index in plan
        assert "TEMP B-TREE" not in plan


@pytest.mark.parametrize("path", ADDRESSES)
def test_a_list_leaves_specs_plans_and_predictions_in_the_database(
    path: str, make_job: Callable[..., Job], as_admin: Client
) -> None:
    fill(make_job, 5)
    large = [found.group(1) for sql in ask(as_admin, path) for found in LARGE.finditer(sql)]
    assert large == []
