"""Pictures of a run: the same numbers, ranges and sentences as the charts that take their place."""

import re

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse
from pytest_django import DjangoAssertNumQueries

from optimizer.base.units import GIB, MIB
from tests.webapp.pages import rows
from webapp.attempts.outcome import finish_attempt
from webapp.attempts.records import record_samples
from webapp.jobs.about import share_job
from webapp.jobs.models import Attempt, Job
from webapp.pages.pictures.job import JobPictures, job_pictures, loss_picture, memory_over_run, memory_within_step

PREDICTION = {
    "device_peak_bytes": 300 * MIB,
    "timeline": [{"offset_ms": 0, "bytes_by_category": {"weights": 300 * MIB}}],
}


@pytest.fixture
def job(ada: User) -> Job:
    return rows.make_job(ada)


def measure(job: Job, num_steps: int) -> Attempt:
    attempt = rows.start(job)
    records = [rows.step_record(attempt, step) for step in range(1, num_steps + 1)]
    records += [rows.eval_record(attempt, step) for step in (0, num_steps)]
    assert record_samples(attempt, [*records, rows.timeline_record(attempt, num_steps)])
    return attempt


def draw(job: Job) -> JobPictures:
    job.refresh_from_db()
    return job_pictures(job, budget_bytes=rows.BUDGET_BYTES)


@pytest.mark.django_db
def test_a_measured_step_is_stacked_with_the_largest_sum_behind(job: Job) -> None:
    measure(job, 10)
    memory = draw(job).memory
    assert memory is not None
    categories = ["weights", "gradients", "optimizer_state", "activations", "logits_and_loss", "temporaries"]
    assert [area.category for area in memory.areas] == categories[::-1]
    assert [line.name for line in memory.lines] == ["predicted", "budget"]
    assert memory.summary.startswith("Device memory over step 10, 60 moments: measured peak ")
    assert [(note.text, note.y) for note in memory.notes] == [("budget 480 MiB", "10.7%")]
    # 44 MiB of weights below a top of 1.12 times the budget
    weights = memory.areas[-1].path
    assert weights.startswith(f"M0 1000V{round(1000 - 1000 * 44 / (1.12 * 480))}")


@pytest.mark.django_db
def test_before_anything_is_measured_the_prediction_stands_alone(job: Job) -> None:
    found = draw(job)
    assert found.loss is None
    assert found.memory is not None
    assert found.memory.areas == ()
    assert [line.name for line in found.memory.lines] == ["predicted", "budget"]
    assert found.memory.summary == "No step has been measured from within yet; the dashed line is the prediction."


@pytest.mark.django_db
def test_a_run_that_goes_on_leaves_room_for_the_steps_to_come(job: Job) -> None:
    attempt = measure(job, 30)
    live = draw(job)
    assert live.loss is not None
    assert live.loss.x.high == rows.NUM_STEPS
    result = {"outcome": "succeeded", "reason": "done", "message": "", "error": None, "step": 30, "artifacts": []}
    assert finish_attempt(attempt, result=result, exit_code=0) == "succeeded"
    ended = draw(job)
    assert ended.loss is not None
    assert ended.loss.x.high == 30
    assert ended.strip is not None
    assert ended.strip.x.ticks == ended.strip.y.ticks == ()


@pytest.mark.django_db
def test_a_generation_has_memory_over_its_tokens_alone(ada: User) -> None:
    job = rows.make_generate_job(ada)
    attempt = rows.start(job)
    assert record_samples(attempt, [rows.generate_record(attempt, number) for number in range(1, 9)])
    found = job_pictures(job, budget_bytes=200 * MIB)
    assert (found.loss, found.strip) == (None, None)
    assert found.memory is not None
    assert found.memory.x.title == "token"
    assert "kv_cache" in [area.category for area in found.memory.areas]


@pytest.mark.django_db
def test_a_page_with_pictures_weighs_a_few_kilobytes_more_and_needs_no_style_or_script(
    browser: Client, job: Job
) -> None:
    attempt = rows.start(job)
    rows.fill(attempt, num_points=5_000)
    assert record_samples(attempt, [rows.timeline_record(attempt, 5_000)])
    text = browser.get(reverse("job", args=[job.pk])).content.decode()
    pictures = re.findall(r'<div class="picture.*?</div>', text, re.DOTALL)
    assert len(pictures) == 3
    assert sum(len(picture) for picture in pictures) < 24_000
    assert not any(re.search(r"style=|<style|<script|onload", picture) for picture in pictures)
    assert "Training loss went from" in text


@pytest.mark.django_db
def test_who_has_the_link_of_a_run_sees_its_pictures(job: Job) -> None:
    measure(job, 10)
    page = Client().get(share_job(job)).content.decode()
    assert page.count('<div class="picture') == 3


@pytest.mark.django_db
def test_a_long_run_costs_no_more_queries_than_a_short_one(
    job: Job, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    rows.fill(rows.start(job), num_points=2_000)
    with django_assert_max_num_queries(8):
        draw(job)


def test_a_budget_far_above_what_is_used_is_an_arrow_at_the_upper_edge() -> None:
    picture = memory_over_run([], prediction=PREDICTION, budget_bytes=1024 * GIB)
    assert picture is not None
    assert [(note.text, note.y, note.is_at_top) for note in picture.notes] == [("▲ budget 1.00 TiB", "0.0%", True)]
    assert [line.name for line in picture.lines] == ["predicted"]
    assert picture.y.high == 1.12 * 1.25 * 300 * MIB


def test_sizes_from_two_gib_on_are_labelled_in_gib() -> None:
    picture = memory_over_run([], prediction={"device_peak_bytes": 7 * GIB}, budget_bytes=8 * GIB)
    assert picture is not None
    assert picture.y.title == "GiB"
    assert [tick.label for tick in picture.y.ticks] == ["0", "2", "4", "6", "8"]


def test_nothing_known_is_no_picture() -> None:
    assert memory_within_step(None, prediction=None, budget_bytes=1) is None
    assert memory_over_run([], prediction=None, budget_bytes=1) is None
    assert loss_picture([{"step": 1, "loss": 2.0}], [], num_steps=5) is None


def test_losses_that_are_no_numbers_are_left_out() -> None:
    steps = [{"step": step, "loss": loss} for step, loss in enumerate([3.0, float("nan"), None, 2.0, float("inf")])]
    picture = loss_picture(steps, [], num_steps=4)
    assert picture is not None
    assert [line.name for line in picture.lines] == ["training"]
    assert picture.lines[0].path.count(" ") == 2
    assert picture.right is None


def test_of_many_moments_the_highest_of_each_stretch_is_kept() -> None:
    points = [[float(at), {"activations": 999 * MIB if at == 4321 else 10 * MIB}] for at in range(10_000)]
    picture = memory_within_step({"step": 1, "points": points}, prediction=None, budget_bytes=None)
    assert picture is not None
    assert picture.areas[0].path.count("v") == 2
    assert "measured peak 999 MiB" in picture.summary
