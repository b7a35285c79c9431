"""Generate jobs on several devices: refused in words, planned and claimed as one, shown device by device."""

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from optimizer.base.errors import InvalidInput
from optimizer.plan.devices.generation_layout import GenerationLayout
from optimizer.plan.generation import GenerationPlan
from tests.webapp.generation import make_generate_spec
from webapp.attempts.claiming import claim_job
from webapp.attempts.records import record_progress, record_started
from webapp.catalog.models import Dataset, Machine, Model
from webapp.jobs.models import Job
from webapp.pages.forms.generation import GenerateForm, initial_from_generate_spec
from webapp.pages.shown.rank_rows import rank_rows
from webapp.pages.words.plan_names import layout_words
from webapp.planning.pricing import price_spec
from webapp.planning.submitting import submit_job

pytestmark = pytest.mark.django_db


def make_spec(writer: Model, prompts: Dataset, *, num_devices: int = 2) -> dict[str, Any]:
    goal = {"device_budget_bytes": 100 * 1024**2, "num_devices": num_devices}
    return make_generate_spec(writer, prompts, goal=goal)


@pytest.fixture
def on_two(ada: User, pair: Machine, writer: Model, prompts: Dataset) -> Job:
    return submit_job(ada, spec=make_spec(writer, prompts), actor="user:ada")


def test_more_devices_than_any_machine_has_are_refused(ada: User, pair: Machine, writer: Model, prompts: Dataset) -> None:
    with pytest.raises(InvalidInput, match="goal.num_devices is 3; the machines here have at most 2 devices"):
        price_spec(ada, make_spec(writer, prompts, num_devices=3))


def test_copies_of_the_model_are_one_job_of_two_devices_with_words_for_each_layout(on_two: Job, pair: Machine) -> None:
    layout = GenerationPlan.from_json(on_two.plan).layout
    assert layout == GenerationLayout(num_replicas=2)
    assert on_two.need_devices == 2
    attempt = claim_job(worker="w", machine=pair)
    assert attempt is not None
    assert attempt.devices == [0, 1]


def test_each_layout_is_compared_in_the_chosen_plans_words(ada: User, pair: Machine, writer: Model, prompts: Dataset) -> None:
    answer = price_spec(ada, make_spec(writer, prompts))
    (chosen,) = [offer for offer in answer.offers if offer.is_chosen]
    assert any(sentence.startswith("one device: ") for sentence in chosen.explanation)
    words = "2 devices, the model cut: not tried, since the model fits on one device with all it needs"
    assert words in chosen.explanation


def test_the_job_page_shows_which_blocks_are_on_which_device(browser: Client, on_two: Job, pair: Machine) -> None:
    plan = {**on_two.plan, "layout": {"num_replicas": 1, "stage_blocks": [1, 1]}}
    stages = [{"first_block": 0, "device_peak_bytes": 90 * 2**20}, {"first_block": 1, "device_peak_bytes": 80 * 2**20}]
    Job.objects.filter(pk=on_two.pk).update(plan=plan, prediction={**on_two.prediction, "stages": stages, "num_replicas": 1})
    attempt = claim_job(worker="w", machine=pair)
    assert attempt is not None
    record_started(attempt, pid=1)
    record_progress(attempt, step=1, eta_s=None, summary={"rank_peak_bytes": [70 * 2**20, 95 * 2**20]})
    text = browser.get(reverse("job", args=[on_two.pk])).content.decode()
    assert "On 2 devices, cut into 1 + 1 blocks, on pair" in text
    table = text[text.index("Peak of each device") :]
    assert table.index("rank 1, block 2") < table.index("rank 0, block 1")
    assert "rank 1: 95.0 MiB measured, 80.0 MiB predicted" in table


def test_copies_are_named_and_each_is_predicted_like_the_first(on_two: Job) -> None:
    assert layout_words(on_two.plan) == "on 2 devices, a copy of the model on each"
    assert [row.predicted_bytes for row in rank_rows(on_two)] == [on_two.prediction["device_peak_bytes"]] * 2


def test_the_form_asks_for_devices_where_a_machine_has_several(writer: Model, prompts: Dataset) -> None:
    rows: dict[str, Any] = {"models": [writer], "prompts": [prompts]}
    assert "num_devices" not in GenerateForm(**rows).fields
    assert GenerateForm(most_devices=2, **rows).fields["num_devices"].label == "Devices, at most"
    assert initial_from_generate_spec(make_spec(writer, prompts))["num_devices"] == 2
