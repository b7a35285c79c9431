"""``GET /compare``: what differs among jobs, over the API."""

from collections.abc import Callable

from django.test import Client

from webapp.jobs.models import Job


def test_jobs_are_compared_in_the_order_asked_for(as_ada: Client, make_job: Callable[..., Job]) -> None:
    a, b = make_job(), make_job()
    document = as_ada.get(f"/api/v1/compare?jobs={b.pk},{a.pk}").json()
    assert [job["id"] for job in document["jobs"]] == [b.pk, a.pk]
    assert document["differences"] == []
    assert {"name": "steps done", "unit": "number", "values": [0.0, 0.0], "lower_is_better": None} in document["outcomes"]


def test_too_few_and_someone_elses_are_422_with_the_field(
    as_ada: Client, as_eve: Client, make_job: Callable[..., Job]
) -> None:
    a, b = make_job(), make_job()
    for client, query in ((as_ada, f"jobs={a.pk}"), (as_ada, ""), (as_eve, f"jobs={a.pk},{b.pk}")):
        refused = client.get(f"/api/v1/compare?{query}")
        assert (refused.status_code, refused.json()["fields"][0]["field"]) == (422, "jobs")
