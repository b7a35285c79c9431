"""The New job page's intents, options, few plans and defaults."""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from tests.webapp.conftest import make_bench, make_spec, make_tiny_model
from tests.webapp.pages import rows
from webapp.accounts.projects import create_project
from webapp.catalog.models import Dataset, Model
from webapp.jobs.models import Job
from webapp.pages.forms.intents import list_intents
from webapp.pages.forms.options import count_words, option_labels
from webapp.pages.forms.training import JobForm, initial_from_spec
from webapp.pages.shown.offer_rows import offer_rows
from webapp.pages.shown.picks import choose_picks, mark_picks
from webapp.serving.choices import list_choices

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("name", ["lora", "qlora", "preference", "full", "exact"])
def test_a_form_filled_by_an_intent_stands_on_it_alone(
    name: str, typed_work: dict[str, str], model: Model, dataset: Dataset
) -> None:
    typed = {**typed_work, "model": model.pk, "dataset": dataset.pk, "device_budget": "1 GiB", "use_adapters": "on"}
    intent = next(each for each in list_intents(JobForm(models=[model], datasets=[dataset])) if each.name == name)
    form = JobForm(typed | intent.changes, models=[model], datasets=[dataset])
    assert form.is_valid(), form.errors
    assert [each.name for each in list_intents(form) if each.is_chosen] == [name]
    again = JobForm(initial=initial_from_spec(form.spec()), models=[model], datasets=[dataset])
    assert name in [each.name for each in list_intents(again) if each.is_chosen]


def test_an_address_names_an_intent(browser: Client, model: Model, dataset: Dataset) -> None:
    form = browser.get(reverse("job_new"), {"recipe": "qlora"}).context["form"]
    assert (form["use_adapters"].value(), form["pin_weights_frozen"].value()) == ("on", "nf4")
    assert browser.get(reverse("job_new"), {"recipe": "magic"}).status_code == 200


def test_options_say_what_decides_and_of_two_with_one_name_the_project(ada: User) -> None:
    rows_of_a_name = [make_tiny_model(ada, name="same"), make_tiny_model(None, name="same")]
    first = rows_of_a_name[0]
    first.project = create_project(ada, name="summaries")
    labels = option_labels(rows_of_a_name)
    assert "summaries" in labels[first.pk]
    assert "no weights: trains from scratch" in labels[first.pk]
    assert "bundled" in labels[rows_of_a_name[1].pk]
    assert "bundled" not in option_labels([rows_of_a_name[1]])[rows_of_a_name[1].pk]


def test_models_of_one_name_in_one_project_are_told_apart_by_time_and_id(ada: User) -> None:
    project = create_project(ada, name="summaries")
    made = [make_tiny_model(ada, name="same") for _ in range(3)]
    Model.objects.update(project=project, created_at=datetime(2026, 11, 23, 9, 5, tzinfo=UTC))
    Model.objects.filter(pk=made[0].pk).update(created_at=datetime(2026, 11, 24, 9, 5, tzinfo=UTC))
    labels = option_labels(list(Model.objects.select_related("project")))
    assert len(set(labels.values())) == 3
    assert re.match(r"same · summaries · added 2026-11-24 \d\d:05 · [\d.]+ K parameters", labels[made[0].pk])
    assert made[1].pk[-6:] in labels[made[1].pk]


def test_every_list_of_models_says_which_of_one_name_is_which(browser: Client, ada: User) -> None:
    for name in ("first", "second"):
        model = make_tiny_model(ada, name="same")
        Model.objects.filter(pk=model.pk).update(project=create_project(ada, name=name), has_weights=True)
    assert {"same · first", "same · second"} <= {choice.label for choice in list_choices(ada)}
    found = browser.get(reverse("search"), {"q": "same"}).content.decode()
    preview = browser.get(reverse("dataset_preview", args=[rows.make_dataset(ada).pk])).content.decode()
    assert all(f">same · {name}<" in text for name in ("first", "second") for text in (found, preview))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (8_030_000_000, "8.03 B parameters"),
        (4_200_000, "4.2 M parameters"),
        (5300, "5.3 K parameters"),
        (12, "12 parameters"),
        (0, "size unknown"),
    ],
)
def test_parameters_are_counted_as_people_count_them(number: int, words: str) -> None:
    assert count_words(number) == words


def test_the_budget_begins_with_what_the_device_can_give(browser: Client, model: Model, dataset: Dataset) -> None:
    assert browser.get(reverse("job_new")).context["form"]["device_budget"].value() == ""
    make_bench(memory_bytes=int(11.37 * 1024**3))
    assert browser.get(reverse("job_new")).context["form"]["device_budget"].value() == "11.3 GiB"


def test_an_empty_budget_is_all_that_the_device_can_give(
    browser: Client, typed_work: dict[str, str], model: Model, dataset: Dataset
) -> None:
    """Who opened the page before the first worker registered once met a required field."""
    typed = {**typed_work, "model": model.pk, "dataset": dataset.pk, "device_budget": ""}
    assert "no machine has registered yet" in browser.post(reverse("job_new"), typed).content.decode()
    asks_again = browser.post(reverse("job_price"), typed).content.decode()
    assert "wait until a worker has measured the first machine or fill in device memory budget" in asks_again
    assert "no machine has registered yet" not in asks_again  # nothing in the form is wrong
    assert 'hx-trigger="load delay:3s"' in asks_again
    make_bench(memory_bytes=5 * 1024**3)
    browser.post(reverse("job_new"), typed)
    assert Job.objects.get(kind="train").spec["goal"]["device_budget_bytes"] == 5 * 1024**3


def test_a_job_without_a_name_is_named_after_its_model_and_data(
    typed_work: dict[str, str], model: Model, dataset: Dataset
) -> None:
    typed = {**typed_work, "name": "", "model": model.pk, "dataset": dataset.pk, "device_budget": "1 GiB"}
    form = JobForm(typed, models=[model], datasets=[dataset])
    assert form.is_valid()
    assert form.spec()["name"] == "tiny on text"


def test_weights_that_would_not_be_used_are_said(
    browser: Client, typed_work: dict[str, str], model: Model, dataset: Dataset
) -> None:
    typed = {**typed_work, "model": model.pk, "dataset": dataset.pk, "device_budget": "1 GiB"}
    assert "would not be used" not in browser.post(reverse("job_price"), typed).content.decode()
    Model.objects.filter(pk=model.pk).update(has_weights=True)
    assert "would not be used" in browser.post(reverse("job_price"), typed).content.decode()


@pytest.mark.parametrize(
    ("mode", "has_weights", "shown"),
    [("pretrain", False, ""), ("finetune", True, ""), ("pretrain", True, "pretrain")],
)
def test_a_clones_mode_follows_its_model_unless_it_was_chosen(
    browser: Client, ada: User, mode: str, has_weights: bool, shown: str
) -> None:
    """A clone whose model was then changed to one with weights once left the weights unused."""
    job = rows.make_job(ada)
    Model.objects.filter(pk=job.model_id).update(has_weights=has_weights)
    Job.objects.filter(pk=job.pk).update(spec={**job.spec, "workload": {**job.spec["workload"], "mode": mode}})
    assert browser.get(reverse("job_new"), {"from": job.pk}).context["form"]["mode"].value() == shown


def offers(**peaks_and_times: tuple[int, float, str]) -> list[dict[str, Any]]:
    """Offers by label: peak in bytes, seconds, verdict; the first is the chosen one."""
    plan = rows.make_plan().to_json()
    return [
        {
            "id": f"plan_{label}", "label": label, "chosen": number == 0, "verdict": verdict, "lossless": True, "explanation": [],
            "machine": {"id": "machine_a", "name": "a", "device": "RTX 3060"}, "costs": [], "plan": plan,
            "prediction": {
                "device_peak_bytes": peak, "host_peak_bytes": 0, "step_ms": time_s * 10, "total_s": time_s, "tokens_per_s": 1.0,
                "time_source": "measured", "device_bytes_by_category": {"weights": peak},
            },
        }
        for number, (label, (peak, time_s, verdict)) in enumerate(peaks_and_times.items())
    ]  # fmt: skip


@pytest.fixture
def pick() -> Callable[..., Any]:
    def choose(selected: str = "", **found: tuple[int, float, str]) -> Any:
        listed = offer_rows(offers(**found), budget_bytes=100, selected=selected)
        picks = choose_picks(listed, budget_bytes=100)
        assert [row.is_pick for row in mark_picks(listed, picks)] == [row.id in {each.row.id for each in picks} for row in listed]
        return [(each.title, each.row.label) for each in picks]

    return choose


def test_the_few_plans_are_the_recommended_the_fastest_and_two_standard_setups(pick: Callable[..., Any]) -> None:
    found = {
        "chosen": (90, 20.0, "fits"), "every_second": (95, 18.0, "tight"), "recompute_all": (40, 30.0, "fits"),
        "offload_all": (60, 25.0, "fits"), "keep_all": (300, 10.0, "does_not_fit"),
    }  # fmt: skip
    roles = [
        ("Recommended", "chosen"), ("Fastest", "every_second"), ("Smallest standard setup", "recompute_all"),
        ("No memory saved", "keep_all"),
    ]  # fmt: skip
    assert pick(**found) == roles
    assert pick(selected="offload_all@machine_a", **found) == [*roles, ("Your choice", "offload_all")]


def test_a_plan_with_several_roles_is_named_once(pick: Callable[..., Any]) -> None:
    assert pick(chosen=(40, 10.0, "fits"), keep_all=(300, 10.0, "does_not_fit")) == [
        ("Recommended, fastest", "chosen"), ("No memory saved", "keep_all"),
    ]  # fmt: skip
    assert pick() == []


def test_a_job_whose_model_is_not_profiled_starts_when_it_is(
    browser: Client, typed_work: dict[str, str], model: Model, dataset: Dataset
) -> None:
    make_bench()
    typed = {**typed_work, "model": model.pk, "dataset": dataset.pk, "device_budget": "1 GiB"}
    assert "Start when ready" in browser.post(reverse("job_price"), typed).content.decode()
    answer = browser.post(reverse("job_new"), typed)
    job = Job.objects.get(kind="train")
    assert answer["Location"] == reverse("job", args=[job.pk])
    text = browser.get(answer["Location"]).content.decode()
    assert "Waiting for the model&#x27;s profile" in text
    assert make_spec(model, dataset)["plan"] == job.spec["plan"]
