"""The part of the form that asks for adapters: closed until it is wanted, errors beside its fields, a clone shows it again."""

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from tests.webapp.pages import rows
from tests.webapp.pages.views.new.test_new_job import errors_beside, typed  # noqa: F401 (a fixture)
from webapp.catalog.models import Dataset, Model
from webapp.jobs.models import Job
from webapp.pages.forms.sentences import field_of
from webapp.pages.forms.training import initial_from_spec

pytestmark = pytest.mark.django_db

ADAPTERS = {"use_adapters": "on", "rank": "4", "alpha": "1e1", "dropout": "0", "targets": "", "export_adapter": "alone"}


def details_of(text: str) -> str:
    before, _, _ = text.partition("<summary>Adapters</summary>")
    return before.rpartition("<details")[2]


def test_the_section_is_closed_until_adapters_are_wanted(browser: Client, model: Model, dataset: Dataset) -> None:
    assert details_of(browser.get(reverse("job_new")).content.decode()) == ">"


def test_a_refused_form_shows_what_was_typed_of_adapters(browser: Client, typed: dict[str, str]) -> None:  # noqa: F811
    text = browser.post(reverse("job_new"), {**typed, **ADAPTERS, "num_steps": "0"}).content.decode()
    assert details_of(text) == " open>"
    assert 'name="alpha" value="1e1"' in text


@pytest.mark.parametrize(
    ("typed_so", "name", "message"),
    [
        ({"rank": "0"}, "rank", "Rank must be 1 to 1,024"),
        ({"dropout": "2"}, "dropout", "Dropout must be 0 to 0.99"),
        ({"targets": "q_proj, w_proj"}, "targets", "“Matrices” names &#x27;w_proj&#x27;"),
    ],
)
def test_what_is_wrong_stands_beside_its_field(
    browser: Client,
    typed: dict[str, str],  # noqa: F811
    llama_model: Model,
    typed_so: dict[str, str],
    name: str,
    message: str,
) -> None:
    form = {**typed, **ADAPTERS, "model": llama_model.pk, **typed_so}
    assert message in errors_beside(browser.post(reverse("job_price"), form).content.decode(), name)


def test_the_fields_ask_for_a_profile_with_those_adapters(browser: Client, typed: dict[str, str], llama_model: Model) -> None:  # noqa: F811
    form = {**typed, **ADAPTERS, "model": llama_model.pk, "targets": "v_proj q_proj"}
    assert "being profiled" in browser.post(reverse("job_price"), form).content.decode()
    adapter = Job.objects.get(kind="profile").spec["adapter"]
    assert adapter == {"rank": 4, "alpha": 10.0, "dropout": 0.0, "targets": ["v_proj", "q_proj"]}


def test_without_the_tick_every_weight_is_trained_whatever_the_fields_say(browser: Client, typed: dict[str, str]) -> None:  # noqa: F811
    browser.post(reverse("job_price"), {**typed, **ADAPTERS, "use_adapters": ""})
    assert "adapter" not in Job.objects.get(kind="profile").spec


def test_a_clone_shows_the_adapters_of_its_job() -> None:
    adapter = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "targets": ["q_proj", "v_proj"]}
    shown = initial_from_spec({"workload": {"adapter": adapter, "export": {"dtype": "bf16", "adapter": "merged"}}})
    assert shown["use_adapters"] is True
    assert (shown["rank"], shown["targets"]) == (2, "q_proj, v_proj")
    assert (shown["export_dtype"], shown["export_adapter"]) == ("bf16", "merged")
    assert "use_adapters" not in initial_from_spec({"workload": {"adapter": None}})


def test_an_error_of_saving_belongs_beside_its_own_field() -> None:
    assert field_of("workload.export.dtype") == "export_dtype"
    assert field_of("workload.adapter.rank") == "rank"


@pytest.fixture
def llama_model(ada: User) -> Model:
    return rows.make_model(ada, name="with names")
