"""``GET /queue`` and a job's priority, over the API."""

import json


def move(client, job, priority):
    return client.post(
        f"/api/v1/jobs/{job.pk}/priority", data=json.dumps({"priority": priority}), content_type="application/json"
    )


def test_the_queue_shows_place_priority_and_reason(as_ada, make_job):
    first, second = make_job(), make_job()
    assert move(as_ada, first, -5).json()["priority"] == -5
    document = as_ada.get("/api/v1/queue").json()
    assert [(row["id"], row["position"], row["priority"]) for row in document["waiting"]] == [
        (second.pk, 1, 0),
        (first.pk, 2, -5),
    ]
    assert {row["reason"] for row in document["waiting"]} == {"next"}
    assert document["live"] == []


def test_a_move_ahead_of_others_is_422_with_what_is_allowed(as_ada, make_job):
    refused = move(as_ada, make_job(), 1)
    assert (refused.status_code, refused.json()["fields"][0]["field"]) == (422, "priority")
    assert "administrators" in refused.json()["hint"]
