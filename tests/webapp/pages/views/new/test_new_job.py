"""The form for a new job: what was typed stays, errors stand beside their field, prices say what is known."""

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from django.urls import reverse
from django.utils.safestring import SafeString

from optimizer.base.errors import NoFeasiblePlan
from optimizer.base.units import MIB
from tests.webapp.pages import rows
from webapp.catalog.models import Dataset, Machine, Model
from webapp.jobs.models import Job, PlanOffer
from webapp.pages.forms.training import JobForm, initial_from_spec
from webapp.pages.forms.work import exact_bytes
from webapp.pages.shown import price_view as pricing
from webapp.pages.shown.price_view import Pricing
from webapp.planning.offers import Offer, PlanAnswer

pytestmark = pytest.mark.django_db


@pytest.fixture
def typed(typed_work: dict[str, str], model: Model, dataset: Dataset) -> dict[str, str]:
    """A form filled in for a model that has never been profiled."""
    return {**typed_work, "model": model.pk, "dataset": dataset.pk, "device_budget": "100 MiB"}


def errors_beside(text: str, name: str) -> str:
    """Texts in the error list of one field."""
    _, _, after = text.partition(f'id="id_{name}_error"')
    return after.partition("</ul>")[0].partition(">")[2]


def test_a_model_that_is_not_profiled_is_unknown_and_being_profiled(browser: Client, typed: dict[str, str]) -> None:
    text = browser.post(reverse("job_price"), typed).content.decode()
    assert ">unknown</span>: being profiled" in text
    assert 'hx-trigger="load delay:2s"' in text
    assert Job.objects.get().kind == "profile"


def test_pricing_does_not_send_the_fields_back(browser: Client, typed: dict[str, str]) -> None:
    text = browser.post(reverse("job_price"), typed).content.decode()
    assert "<input" not in text
    assert "<select" not in text


def test_what_does_not_parse_is_named_beside_its_field(browser: Client, typed: dict[str, str]) -> None:
    text = browser.post(reverse("job_price"), {**typed, "device_budget": "a lot"}).content.decode()
    expected = (
        "size &#x27;a lot&#x27; is not understood; write a number and one of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB"
    )
    assert expected in errors_beside(text, "device_budget")
    assert errors_beside(text, "num_steps") == ""


def test_what_is_out_of_range_is_named_beside_its_field(browser: Client, typed: dict[str, str]) -> None:
    text = browser.post(reverse("job_price"), {**typed, "warmup_steps": "50"}).content.decode()
    assert "Warm-up steps must be 0 to 49" in errors_beside(text, "warmup_steps")


def test_a_refused_form_keeps_everything_that_was_typed(browser: Client, typed: dict[str, str]) -> None:
    answer = browser.post(reverse("job_new"), {**typed, "num_steps": "0", "name": "my words"})
    text = answer.content.decode()
    assert answer.status_code == 200
    assert 'value="my words"' in text
    assert 'name="learning_rate" value="1e-3"' in text
    assert 'value="100 MiB"' in text
    assert "Steps must be 1 to 100,000,000" in errors_beside(text, "num_steps")
    assert not Job.objects.filter(kind="train").exists()


def test_anothers_dataset_cannot_be_named(browser: Client, eve: User, typed: dict[str, str]) -> None:
    theirs = rows.make_dataset(eve, name="diary")
    text = browser.post(reverse("job_new"), {**typed, "dataset": theirs.pk}).content.decode()
    assert "Select a valid choice" in errors_beside(text, "dataset")
    assert "diary" not in text


def test_a_clone_starts_with_the_settings_of_its_job(browser: Client, ada: User) -> None:
    job = rows.make_job(ada)
    form = browser.get(reverse("job_new"), {"from": job.pk}).context["form"]
    assert form["num_steps"].value() == rows.NUM_STEPS
    assert form["device_budget"].value() == "480 MiB"
    assert form["model"].value() == job.model_id


@pytest.mark.parametrize(("num_bytes", "text"), [(480 * MIB, "480 MiB"), (480 * MIB + 1, "503316481 B"), (0, "0 B")])
def test_a_budget_is_written_so_that_it_reads_back_equal(num_bytes: int, text: str) -> None:
    assert exact_bytes(num_bytes) == text
    assert initial_from_spec({"goal": {"device_budget_bytes": num_bytes}})["device_budget"] == text


def test_an_uploaded_dataset_is_selected_in_the_form(browser: Client) -> None:
    file = SimpleUploadedFile("verse.txt", b"In the beginning God created the heaven and the earth.\n" * 20)
    answer = browser.post(reverse("job_new_dataset"), {"name": "verse", "file": file})
    made = Dataset.objects.get(name="verse")
    assert f'<option value="{made.pk}" selected>verse · 1 document</option>' in answer.content.decode()
    assert answer["HX-Trigger-After-Settle"] == "uploaded"


def test_a_refused_upload_is_explained_beside_its_field(browser: Client, dataset: Dataset) -> None:
    file = SimpleUploadedFile("verse.pdf", b"%PDF")
    answer = browser.post(reverse("job_new_dataset"), {"name": "verse", "file": file, "dataset": dataset.pk})
    text = answer.content.decode()
    assert "file is named &#x27;verse.pdf&#x27;; allowed: .txt, .jsonl, .json, .csv, .parquet" in text
    assert f'<option value="{dataset.pk}" selected>' in text
    assert "HX-Trigger-After-Settle" not in answer


def test_an_unknown_architecture_is_named_with_those_that_work(browser: Client) -> None:
    config = SimpleUploadedFile("config.json", b'{"model_type": "wavenet"}')
    text = browser.post(reverse("models"), {"name": "odd", "config": config}).content.decode()
    assert "model_type &#x27;wavenet&#x27; is not supported; supported: " in text


def offer_of(
    user: User,
    machine: Machine,
    *,
    label: str,
    chosen: bool = False,
    verdict: str = "fits",
    step_ms: float = 1650.0,
    activations: int = 176 * MIB,
) -> Offer:
    prediction = rows.make_prediction().to_json()
    prediction["step_ms"] = step_ms
    prediction["device_bytes_by_category"] = dict(rows.PEAK, activations=activations)
    row = PlanOffer.objects.create(
        owner=user,
        spec={},
        machine=machine,
        label=label,
        plan=rows.make_plan().to_json(),
        prediction=prediction,
        verdict=verdict,
        basis="b" * 64,
    )
    return Offer(row=row, is_chosen=chosen, is_lossless=True, explanation=["it fits"])


def shown(found: Pricing) -> tuple[SafeString, str]:
    from django.template.loader import render_to_string

    context = {"pricing": found, "form": JobForm(models=[], datasets=[]), "form_url": "/form/"}
    return render_to_string("jobs/verdict.html", context), "".join(
        render_to_string(f"jobs/{name}.html", context) for name in ("picks", "plans")
    )


def test_the_verdict_is_a_word_with_bytes_by_category_and_times(ada: User, machine: Machine) -> None:
    answer = PlanAnswer(profile="ready", offers=[offer_of(ada, machine, label="chosen", chosen=True)])
    verdict, plans = shown(pricing._answered(answer, budget_bytes=480 * MIB, selected=""))
    assert ">fits</span>" in verdict
    assert "activations" in plans
    assert "1.65 s" in verdict
    assert "3 min" in verdict
    assert 'aria-label="409 MiB of a budget of 480 MiB: weights 44.0 MiB, gradients 44.0 MiB' in plans


def test_only_bytes_that_differ_from_the_chosen_plan_are_bold(ada: User, machine: Machine) -> None:
    offers = [
        offer_of(ada, machine, label="keep_all", verdict="does_not_fit", step_ms=900.0, activations=500 * MIB),
        offer_of(ada, machine, label="chosen", chosen=True),
    ]
    found = pricing._answered(PlanAnswer(profile="ready", offers=offers), budget_bytes=480 * MIB, selected="")
    assert [row.label for row in found.offers] == ["chosen", "keep_all"]
    assert [cell.differs for cell in found.offers[0].cells] == [False] * 6
    assert [cell.differs for cell in found.offers[1].cells] == [False, False, False, True, False, False]
    assert 'name="override"' in shown(found)[1]


def test_a_plan_that_was_taken_stays_taken_when_priced_anew(ada: User, machine: Machine) -> None:
    offers = [
        offer_of(ada, machine, label="chosen", chosen=True),
        offer_of(ada, machine, label="recompute_all", step_ms=2000.0),
    ]
    selected = f"recompute_all@{machine.pk}"
    found = pricing._answered(PlanAnswer(profile="ready", offers=offers), budget_bytes=480 * MIB, selected=selected)
    assert [row.selected for row in found.offers] == [False, True]


def test_what_does_not_fit_shows_the_smallest_budget_and_the_largest_part(ada: User, machine: Machine) -> None:
    error = NoFeasiblePlan(budget_bytes=100 * MIB, smallest_feasible_bytes=207 * MIB + 5, bytes_by_category=rows.PEAK)
    error.fields["offers"] = [offer_of(ada, machine, label="keep_all", verdict="does_not_fit").to_json()]
    found = pricing._nothing_fits(error, budget_bytes=100 * MIB, selected="")
    verdict, plans = shown(found)
    assert ">does not fit</span>" in verdict
    assert "the largest part is activations" in verdict
    assert 'href="/form/?device_budget=208+MiB"' in verdict
    assert "plain training, no memory saved" in plans
    assert "<summary>Start a plan that does not fit</summary>" in plans


def test_a_way_out_names_its_peak_and_its_time_once_and_is_what_to_press(ada: User, machine: Machine) -> None:
    error = NoFeasiblePlan(budget_bytes=100 * MIB, smallest_feasible_bytes=207 * MIB, bytes_by_category=rows.PEAK)
    way = {"kind": "budget", "what": "a budget of 207 MiB", "sentence": "a budget of 207 MiB: at most 206 MiB, 1 s a step"}
    change = {"goal": {"device_budget_bytes": 207 * MIB}}
    error.fields["ways_out"] = [way | {"change": change, "expense": "nothing", "device_peak_bytes": 206 * MIB, "step_ms": 1180.0}]
    verdict, _ = shown(pricing._nothing_fits(error, budget_bytes=100 * MIB, selected=""))
    assert '<a class="button primary"' in verdict
    assert verdict.count("206") == 1
    assert "1.18 s a step" in verdict
    assert "1 s a step" not in verdict.replace("1.18 s a step", "")


def test_the_form_begins_with_the_smallest_model_until_one_has_ones_own(browser: Client, ada: User) -> None:
    small, large = rows.make_model(name="small"), rows.make_model(name="large")
    Model.objects.filter(pk=large.pk).update(num_parameters=10**12)
    assert f'<option value="{small.pk}" selected>' in browser.get(reverse("job_new")).content.decode()
    own = rows.make_model(ada, name="own")
    Model.objects.filter(pk=own.pk).update(num_parameters=10**13)
    assert f'<option value="{own.pk}" selected>' in browser.get(reverse("job_new")).content.decode()


@pytest.mark.parametrize(
    ("chosen", "goal"),
    [
        ("", {"allow_lossy": False}),
        ("rounding", {"allow_lossy": True, "most_loss": "rounding"}),
        ("any", {"allow_lossy": True, "most_loss": "any"}),
    ],
)
def test_how_far_the_numbers_may_change_is_one_choice_that_a_clone_keeps(
    typed: dict[str, str], model: Model, dataset: Dataset, chosen: str, goal: dict[str, Any]
) -> None:
    form = JobForm({**typed, "most_loss": chosen}, models=[model], datasets=[dataset])
    assert form.is_valid()
    spec = form.spec()
    assert {name: spec["goal"][name] for name in ("allow_lossy", "most_loss") if name in spec["goal"]} == goal
    assert initial_from_spec(spec)["most_loss"] == chosen


@pytest.mark.parametrize("chosen", ["", "replan", "stop"])
def test_a_person_chooses_what_happens_when_memory_runs_out(
    typed: dict[str, str], model: Model, dataset: Dataset, chosen: str
) -> None:
    form = JobForm({**typed, "on_out_of_memory": chosen}, models=[model], datasets=[dataset])
    assert form.is_valid(), form.errors
    spec = form.spec()
    assert spec["goal"].get("on_out_of_memory", "") == chosen
    assert initial_from_spec(spec).get("on_out_of_memory", "") == chosen


def test_the_verdict_says_what_of_the_models_config_is_in_no_price(
    browser: Client, typed: dict[str, str], model: Model
) -> None:
    assert "is not read" not in browser.post(reverse("job_price"), typed).content.decode()
    Model.objects.filter(pk=model.pk).update(unread=["of the config not read: layerdrop 0.1"])
    assert "<li>Of the config not read: layerdrop 0.1</li>" in browser.post(reverse("job_price"), typed).content.decode()
