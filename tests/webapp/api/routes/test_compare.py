"""``GET /compare``: what differs among jobs, over the API."""


def test_jobs_are_compared_in_the_order_asked_for(as_ada, make_job):
    a, b = make_job(), make_job()
    document = as_ada.get(f"/api/v1/compare?jobs={b.pk},{a.pk}").json()
    assert [job["id"] for job in document["jobs"]] == [b.pk, a.pk]
    assert document["differences"] == []
    assert {"name": "steps done", "unit": "number", "values": [0.0, 0.0], "lower_is_better": None} in document["outcomes"]


def test_too_few_and_someone_elses_are_422_with_the_field(as_ada, as_eve, make_job):
    a, b = make_job(), make_job()
    for client, query in ((as_ada, f"jobs={a.pk}"), (as_ada, ""), (as_eve, f"jobs={a.pk},{b.pk}")):
        refused = client.get(f"/api/v1/compare?{query}")
        assert (refused.status_code, refused.json()["fields"][0]["field"]) == (422, "jobs")
