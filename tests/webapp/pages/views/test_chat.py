"""The Chat page, and the page of a job that holds a model."""

import pytest
from django.test import Client

from tests.webapp.conftest import make_person
from webapp.catalog.bundled import ensure_bundled
from webapp.catalog.models import Model
from webapp.jobs.actions import create_job
from webapp.jobs.models import Kind


@pytest.fixture
def client(db: None) -> Client:
    client = Client()
    client.force_login(make_person("bob"))
    return client


def test_without_a_model_that_can_answer_the_page_says_what_to_do(client: Client) -> None:
    page = client.get("/chat/").content.decode()
    assert "No model can answer yet" in page
    assert 'id="chat"' not in page


def test_models_with_weights_are_offered(client: Client) -> None:
    ensure_bundled()
    page = client.get("/chat/").content.decode()
    assert "headroom-chat-4m</option>" in page
    assert "headroom-demo-10m</option>" not in page  # has no weights
    assert "nothing beside it" in page


def test_the_job_that_holds_a_model_has_a_page(client: Client) -> None:
    ensure_bundled()
    model = Model.objects.get(name="headroom-chat-4m")
    owner = make_person("carl", is_admin=True)
    serving = {"num_rows": 8, "context_tokens": 512, "weights": "same", "idle_s": 600}
    job = create_job(
        owner=owner,
        project=None,
        spec={"kind": "serve", "name": "answers", "model": model.pk, "serving": serving, "goal": {"device_budget_bytes": 1000}},
        model=model,
        dataset=None,
        plan=None,
        prediction={"device_peak_bytes": 900, "device_peak_low_bytes": 500, "device_peak_high_bytes": 900},
        machine=None,
        kind=Kind.SERVE,
        actor="user:carl",
        num_steps=0,
    )
    client.force_login(owner)
    page = client.get(f"/jobs/{job.pk}/").content.decode()
    assert "Held for up to 8 askers at once, 512 tokens for each" in page
    assert 'data-live="step">0</span> answers' in page
    assert "Take it down" in page
    assert "ms left" not in page
    assert client.get(f"/api/v1/jobs/{job.pk}").json()["kind"] == "serve"
