"""``GET /queue`` and a job's priority, over the API."""

import json
from collections.abc import Callable
from typing import Any

from django.test import Client

from webapp.jobs.models import Job


def move(client: Client, job: Job, priority: int) -> Any:
    return client.post(
        f"/api/v1/jobs/{job.pk}/priority", data=json.dumps({"priority": priority}), content_type="application/json"
    )


def test_the_queue_shows_place_priority_and_reason(as_ada: Client, make_job: Callable[..., Job]) -> None:
    first, second = make_job(), make_job()
    assert move(as_ada, first, -5).json()["priority"] == -5
    document = as_ada.get("/api/v1/queue").json()
    assert [(row["id"], row["position"], row["priority"]) for row in document["waiting"]] == [
        (second.pk, 1, 0),
        (first.pk, 2, -5),
    ]
    assert {row["reason"] for row in document["waiting"]} == {"next"}
    assert document["live"] == []


def test_a_move_ahead_of_others_is_422_with_what_is_allowed(as_ada: Client, make_job: Callable[..., Job]) -> None:
    refused = move(as_ada, make_job(), 1)
    assert (refused.status_code, refused.json()["fields"][0]["field"]) == (422, "priority")
    assert "administrators" in refused.json()["hint"]
