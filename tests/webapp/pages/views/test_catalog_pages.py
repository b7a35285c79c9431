"""The pages of models and datasets."""

import json
from pathlib import Path

import pytest
from django.contrib.auth.models import User
from django.test import Client

from tests.webapp.conftest import make_text, make_tiny_model
from tests.webapp.pages import rows
from webapp.catalog.bundled import ensure_bundled
from webapp.catalog.models import Dataset, Model
from webapp.jobs.models import Job

pytestmark = pytest.mark.django_db


def text_of(browser: Client, path: str) -> str:
    answer = browser.get(path)
    assert answer.status_code == 200
    return answer.content.decode()


def test_a_model_s_page_shows_its_parts_with_repeated_blocks_folded(browser: Client) -> None:
    model = rows.make_model()
    text = text_of(browser, f"/models/{model.pk}/")
    assert "blocks 1 to 12" in text
    assert "12 × block" in text
    assert "shares the embedding" not in text
    assert "attention heads" in text
    assert f'hx-get="/models/{model.pk}/cards/"' in text


def test_a_model_that_nobody_profiled_offers_to_work_out_its_cards(browser: Client, new_llama: Model) -> None:
    path = f"/models/{new_llama.pk}/cards/"
    text = text_of(browser, path)
    assert "not worked out yet" in text
    assert "Verdict for each card" not in text  # of which nothing is known
    assert not Job.objects.filter(kind="profile").exists()
    answer = browser.post(path, follow=True)
    assert "being profiled by a worker" in answer.content.decode()
    assert Job.objects.filter(kind="profile").count() == 3


def test_a_profiled_model_says_what_each_card_can_do(browser: Client, profiled_llama: Model) -> None:
    document = browser.get(f"/api/v1/models/{profiled_llama.pk}/cards").json()
    full = document["methods"][0]
    assert (full["name"], full["state"]) == ("full", "ready")
    assert 0 < full["least_bytes"] < full["plain_bytes"]
    assert {card["verdicts"]["full"] for card in document["cards"]} == {"fits"}
    assert {card["verdicts"]["lora"] for card in document["cards"]} == {None}
    assert 'verdict-fits">fits<' in text_of(browser, f"/models/{profiled_llama.pk}/cards/")


def test_a_dataset_s_page_shows_its_first_records_and_how_long_they_are(browser: Client, ada: User) -> None:
    dataset = make_text(ada)
    facts = {"num_characters": 8, "records": ["first one", "second"], "lengths": [[8, 3], [1024, 1]]}
    Dataset.objects.filter(pk=dataset.pk).update(facts=facts)
    text = text_of(browser, f"/datasets/{dataset.pk}/")
    assert "first one" in text
    assert "4 to 7" in text
    assert "512 to 1,023" in text
    assert json.dumps("512 to 1,023") in text


def test_a_dataset_of_an_earlier_version_can_be_looked_into_again(
    browser: Client, ada: User, headroom_home: Path
) -> None:
    folder = headroom_home / "datasets" / "text"
    folder.mkdir(parents=True)
    (folder / "data.txt").write_text("one\n\n\nthree")
    dataset = make_text(ada)
    assert "Look into the file" in text_of(browser, f"/datasets/{dataset.pk}/")
    answer = browser.post(f"/datasets/{dataset.pk}/read/", follow=True)
    assert "2 to 3" in answer.content.decode()
    assert Dataset.objects.get().facts["records"] == ["one", "three"]


def test_a_deletion_is_undone_by_one_button(browser: Client, ada: User, headroom_home: Path) -> None:
    model = make_tiny_model(ada)
    (headroom_home / "models" / model.pk).mkdir(parents=True)
    answer = browser.post(f"/models/{model.pk}/delete/", follow=True)
    text = answer.content.decode()
    assert "tiny is deleted" in text
    assert f'action="/models/{model.pk}/restore/"' in text
    assert browser.get(f"/models/{model.pk}/").status_code == 404
    answer = browser.post(f"/models/{model.pk}/restore/", follow=True)
    assert answer.status_code == 200
    assert Model.objects.get().deleted_at is None


def test_what_ships_with_the_program_has_no_button_to_delete_it(browser: Client, admin: User) -> None:
    model, dataset = rows.make_model(), rows.make_dataset()
    assert "/delete/" not in text_of(browser, f"/models/{model.pk}/")
    assert "/delete/" not in text_of(browser, f"/datasets/{dataset.pk}/")
    assert browser.post(f"/models/{model.pk}/delete/").status_code == 403
    browser.force_login(admin)
    answer = browser.post(f"/models/{model.pk}/delete/", follow=True)
    assert "ships with the program and stays" in answer.content.decode()


def test_someone_else_s_model_and_dataset_are_not_there(browser: Client, eve: User) -> None:
    model, dataset = make_tiny_model(eve), make_text(eve)
    for path in (f"/models/{model.pk}/", f"/models/{model.pk}/cards/", f"/datasets/{dataset.pk}/"):
        assert browser.get(path).status_code == 404
    for path in (f"/models/{model.pk}/delete/", f"/models/{model.pk}/restore/", f"/datasets/{dataset.pk}/read/"):
        assert browser.post(path).status_code == 404


def test_the_jobs_of_a_model_are_listed(browser: Client, ada: User, eve: User) -> None:
    job = rows.make_job(ada, name="mine")
    rows.make_job(eve, name="hers")
    for path in (f"/models/{job.model_id}/", f"/datasets/{job.dataset_id}/"):
        text = text_of(browser, path)
        assert ">mine<" in text
        assert "hers" not in text


@pytest.fixture
def chats(db: None) -> Dataset:
    ensure_bundled()
    return Dataset.objects.get(name="kjv-chats")


def test_a_dataset_s_page_shows_the_parts_of_samples_that_are_learnt(browser: Client, chats: Dataset) -> None:
    assert f'hx-get="/datasets/{chats.pk}/preview/"' in text_of(browser, f"/datasets/{chats.pk}/")
    text = text_of(browser, f"/datasets/{chats.pk}/preview/")
    assert "Written by the model’s own chat template." in text
    assert "&lt;|user|&gt;\nSay something about deeds.&lt;|end|&gt;" in text
    assert "<mark>Ye do the deeds of your father." in text
    assert '<dt>samples cut</dt><dd class="num">0</dd>' in text


@pytest.mark.parametrize(
    ("asked", "words"),
    [("sequence_length=many", "The row length is"), ("sequence_length=3", "sequence_length"), ("model=nobody", "learnt")],
)
def test_a_preview_that_cannot_be_made_says_why(browser: Client, chats: Dataset, asked: str, words: str) -> None:
    assert words in text_of(browser, f"/datasets/{chats.pk}/preview/?{asked}")
