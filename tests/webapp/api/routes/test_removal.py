"""Deleting models and datasets: out of sight, back again, and after some days gone."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from tests.webapp.conftest import make_text, make_tiny_model
from tests.webapp.pages import rows
from webapp.catalog.models import Dataset, Model
from webapp.catalog.removal import KEPT, purge_deleted
from webapp.jobs.actions import cancel_job
from webapp.jobs.models import Job

pytestmark = pytest.mark.django_db


@pytest.fixture
def api(client: Client, ada: User) -> Client:
    client.force_login(ada)
    return client


@pytest.fixture
def mine(ada: User, headroom_home: Path) -> Model:
    model = make_tiny_model(ada)
    Model.objects.filter(pk=model.pk).update(folder=f"models/{model.pk}")
    folder = headroom_home / "models" / model.pk
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(model.config))
    return model


def long_ago(row: Model) -> None:
    type(row).objects.filter(pk=row.pk).update(deleted_at=timezone.now() - KEPT - timedelta(hours=1))


def test_a_deleted_model_is_out_of_sight_and_can_be_had_back(api: Client, mine: Model) -> None:
    answer = api.delete(f"/api/v1/models/{mine.pk}").json()
    assert answer["restorable_until"] > answer["deleted_at"]
    assert api.get(f"/api/v1/models/{mine.pk}").status_code == 404
    assert api.get("/api/v1/models").json()["results"] == []
    assert api.post(f"/api/v1/models/{mine.pk}/restore").json()["id"] == mine.pk
    assert api.get(f"/api/v1/models/{mine.pk}").status_code == 200


def test_a_deleted_dataset_is_out_of_sight(api: Client, ada: User) -> None:
    dataset = make_text(ada)
    assert api.delete(f"/api/v1/datasets/{dataset.pk}").status_code == 200
    assert api.get("/api/v1/datasets").json()["results"] == []


def test_what_ships_with_the_program_stays(api: Client, admin: User) -> None:
    path = f"/api/v1/models/{make_tiny_model().pk}"
    assert api.delete(path).status_code == 403
    api.force_login(admin)
    answer = api.delete(path)
    assert answer.status_code == 409
    assert "ships with the program" in answer.json()["detail"]


def test_someone_else_s_is_not_there(client: Client, eve: User, mine: Model) -> None:
    client.force_login(eve)
    assert client.delete(f"/api/v1/models/{mine.pk}").status_code == 404
    assert client.post(f"/api/v1/models/{mine.pk}/restore").status_code == 404


def test_after_some_days_it_is_gone_with_its_files(api: Client, mine: Model, headroom_home: Path) -> None:
    api.delete(f"/api/v1/models/{mine.pk}")
    assert purge_deleted() == []
    long_ago(mine)
    assert purge_deleted() == [mine.pk]
    assert not (headroom_home / "models" / mine.pk).exists()
    assert not Model.objects.filter(pk=mine.pk).exists()


def test_rows_named_by_an_ended_job_lose_only_their_files(
    api: Client, ada: User, mine: Model, headroom_home: Path
) -> None:
    dataset = Dataset.objects.create(owner=ada, name="d", format="txt", file="x", sha256="0" * 64, num_bytes=1)
    job = rows.make_job(ada)
    Job.objects.filter(pk=job.pk).update(model=mine, dataset=dataset)
    api.delete(f"/api/v1/models/{mine.pk}")
    long_ago(mine)
    assert purge_deleted() == []
    cancel_job(Job.objects.get(pk=job.pk), mode="discard", actor="user:ada")
    assert purge_deleted() == [mine.pk]
    assert purge_deleted() == []
    assert not (headroom_home / "models" / mine.pk).exists()
    assert Job.objects.get(pk=job.pk).model.name == "tiny"
    assert api.post(f"/api/v1/models/{mine.pk}/restore").status_code == 409
    answer = api.post(f"/api/v1/jobs/{job.pk}/retry")
    assert answer.status_code == 409
    assert "tiny was deleted" in answer.json()["detail"]
