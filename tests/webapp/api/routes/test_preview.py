"""Over the API: what training on a dataset would learn with a model."""

import pytest
from django.test import Client

from tests.webapp.conftest import make_person
from webapp.catalog.bundled import ensure_bundled
from webapp.catalog.models import Dataset

pytestmark = pytest.mark.django_db


@pytest.fixture
def chats(db: None) -> Dataset:
    ensure_bundled()
    return Dataset.objects.get(name="kjv-chats")


def test_a_preview_is_written_by_the_models_own_template(as_ada: Client, chats: Dataset) -> None:
    asked = {"model": "headroom-chat-4m", "sequence_length": 256}
    answer = as_ada.get(f"/api/v1/datasets/{chats.pk}/preview", asked).json()
    assert answer["template"] == "own"
    question, learnt = answer["samples"][0]["parts"]
    assert question[0].startswith("<|user|>\n")
    assert (question[1], learnt[1]) == (False, True)
    assert learnt[0].endswith(")<|end|>\n")
    assert answer["packed_rows"] < answer["num_samples"] / 2


@pytest.mark.parametrize(
    ("asked", "status"),
    [({"model": "headroom-chat-4m", "sequence_length": 3}, 422), ({"model": "nobody"}, 422), ({}, 422)],
)
def test_a_bad_question_is_refused(as_ada: Client, chats: Dataset, asked: dict[str, object], status: int) -> None:
    assert as_ada.get(f"/api/v1/datasets/{chats.pk}/preview", asked).status_code == status


def test_strangers_see_no_preview_of_anothers_dataset(as_ada: Client, chats: Dataset) -> None:
    Dataset.objects.filter(pk=chats.pk).update(owner=make_person("bob"))
    assert as_ada.get(f"/api/v1/datasets/{chats.pk}/preview", {"model": "headroom-chat-4m"}).status_code == 404
