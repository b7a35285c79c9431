"""The page of one job: what it says in each state, and what its buttons do."""

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse
from pytest_django import Settings

from optimizer.base.units import MIB
from tests.webapp.pages import rows
from webapp.accounts.projects import set_member
from webapp.attempts.outcome import finish_attempt
from webapp.attempts.records import record_checkpoint, record_progress, record_samples
from webapp.catalog.models import Machine
from webapp.jobs.models import Job
from webapp.pages.presentation import clock_words

pytestmark = pytest.mark.django_db


@pytest.fixture
def job(ada: User) -> Job:
    return rows.make_job(ada)


def page_of(browser: Client, job: Job, **query: Any) -> str:
    answer = browser.get(reverse("job", args=[job.pk]), query)
    assert answer.status_code == 200
    return answer.content.decode()


def fail_for_memory(job: Job) -> None:
    attempt = rows.start(job)
    record_checkpoint(attempt, step=1, folder="checkpoints/step-000001-f1", manifest_sha256="c" * 64, num_bytes=10)
    result = rows.out_of_memory_result(moment="at step 3")
    assert finish_attempt(attempt, result=result, exit_code=1) == "failed"


def test_a_queued_job_says_what_it_waits_for_in_the_words_of_the_queue(browser: Client, job: Job) -> None:
    # a moment, not seconds, which would stand still between two looks
    assert f"Waiting for a free worker. Queued since {clock_words(job.created_at)}." in page_of(browser, job)
    second = rows.make_job(job.owner, name="second")
    assert "Waiting for a free worker; 1 job ahead." in page_of(browser, second)
    Machine.objects.update(draining=True)
    assert "no worker there takes jobs at present" in page_of(browser, job)


def test_a_job_that_waits_asks_for_the_reason_again_and_one_that_runs_does_not(browser: Client, job: Job) -> None:
    head = reverse("job_head", args=[job.pk])
    assert f'id="job-waiting" hx-get="{head}"' in page_of(browser, job)
    rows.start(job)
    assert "every 10s" not in page_of(browser, job)


def test_a_running_job_shows_its_step_and_the_time_left(browser: Client, job: Job) -> None:
    attempt = rows.start(job)
    record_progress(attempt, step=80, eta_s=360.0, summary={"loss": 3.914, "device_peak_bytes": 412 * MIB})
    text = page_of(browser, job)
    assert "6 min left" in text
    assert ">3.914<" in text
    assert "412 MiB" in text
    assert "480 MiB" in text


def test_the_prediction_error_is_signed_from_the_prediction(browser: Client, job: Job) -> None:
    attempt = rows.start(job)
    record_progress(attempt, step=1, eta_s=None, summary={"device_peak_bytes": sum(rows.PEAK.values()) * 2})
    assert "−50.0 %" in page_of(browser, job)


def test_the_charts_get_prediction_and_budget_as_data(browser: Client, job: Job) -> None:
    facts = browser.get(reverse("job", args=[job.pk])).context["facts"]
    assert facts["budget_bytes"] == 480 * MIB
    assert facts["job"]["prediction"]["device_peak_bytes"] == sum(rows.PEAK.values())
    assert [category["key"] for category in facts["categories"]][:4] == [
        "weights",
        "gradients",
        "optimizer_state",
        "activations",
    ]


def test_each_block_of_the_plan_has_its_letter(browser: Client, job: Job) -> None:
    text = page_of(browser, job)
    assert [text.count(f">{letter}</b>") for letter in "KRO"] == [2, 6, 4]


def test_a_name_is_shown_as_text_never_as_markup(browser: Client, ada: User) -> None:
    job = rows.make_job(ada, name="<script>alert(1)</script>")
    text = page_of(browser, job)
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_a_failed_job_opens_on_its_cause_sizes_and_next_step(browser: Client, job: Job) -> None:
    fail_for_memory(job)
    text = page_of(browser, job)
    assert "Device memory ran out at step 3: 96.0 MiB more were needed" in text
    assert 'aria-label="498 MiB of a budget of 480 MiB: weights 44.0 MiB' in text
    assert "more requested 96.0 MiB" in text
    assert f'href="/jobs/new/?from={job.pk}">Run again with another plan</a>' in text
    assert "The checkpoint at step 1 is kept." in text
    assert text.index("Device memory ran out") < text.index("chart-memory")


def test_stop_now_names_what_would_be_lost(browser: Client, job: Job) -> None:
    attempt = rows.start(job)
    record_progress(attempt, step=58, eta_s=None, summary={})
    record_checkpoint(attempt, step=50, folder="checkpoints/step-000050-f1", manifest_sha256="c" * 64, num_bytes=10)
    assert "About 8 steps since the checkpoint at step 50 would be lost" in page_of(browser, job)


@pytest.mark.parametrize(("mode", "kept"), [("save", "save"), ("discard", "discard")])
def test_stopping_a_running_job_asks_its_worker(browser: Client, job: Job, mode: str, kept: str) -> None:
    rows.start(job)
    browser.post(reverse("job_cancel", args=[job.pk]), {"mode": mode})
    job.refresh_from_db()
    assert (job.state, job.cancel_mode) == ("running", kept)
    assert ">stopping<" in page_of(browser, job)


def test_a_queued_job_is_paused_and_resumed(browser: Client, job: Job) -> None:
    browser.post(reverse("job_pause", args=[job.pk]))
    text = page_of(browser, job)
    assert ">paused<" in text
    assert "action-resume" in text
    assert "action-pause" not in text
    browser.post(reverse("job_resume", args=[job.pk]))
    assert "action-pause" in page_of(browser, job)


def test_a_pause_and_a_resume_are_taken_back_by_one_button(browser: Client, job: Job) -> None:
    for did, button in (("job_pause", "job_resume"), ("job_resume", "job_pause")):
        text = browser.post(reverse(did, args=[job.pk]), follow=True).content.decode()
        undo = f'<form method="post" action="{reverse(button, args=[job.pk])}" class="inline">'
        # a paragraph could not hold it
        assert undo in text[text.index('role="status"') : text.index("</div>", text.index('role="status"'))]
        assert ">Undo</button>" in text


def test_a_job_that_was_stopped_before_it_began_can_be_put_back(browser: Client, job: Job) -> None:
    text = browser.post(reverse("job_cancel", args=[job.pk]), {"mode": "save"}, follow=True).content.decode()
    assert "Stopped before it began." in text
    assert ">Put it back in the queue</button>" in text


def test_stopping_a_job_at_work_offers_no_undo(browser: Client, job: Job) -> None:
    rows.start(job)
    text = browser.post(reverse("job_cancel", args=[job.pk]), {"mode": "save"}, follow=True).content.decode()
    assert "Put it back" not in text


def test_who_may_only_look_gets_no_buttons_that_would_be_refused(client: Client, job: Job, eve: User) -> None:
    rows.start(job)
    set_member(job.project, username="eve", role="viewer")
    client.force_login(eve)
    text = page_of(client, job)
    assert "You may look at this job" in text
    assert "action-save" not in text
    assert "action-clone" in text


def test_a_retry_leads_to_the_new_job(browser: Client, job: Job) -> None:
    fail_for_memory(job)
    answer = browser.post(reverse("job_retry", args=[job.pk]))
    retry = Job.objects.exclude(pk=job.pk).get()
    assert answer["Location"] == reverse("job", args=[retry.pk])
    assert retry.plan == job.plan


def test_a_retry_past_the_queue_s_room_is_explained(browser: Client, job: Job, settings: Settings) -> None:
    fail_for_memory(job)
    settings.HEADROOM_MAX_QUEUED_PER_PERSON = 1
    browser.post(reverse("job_retry", args=[job.pk]))
    answer = browser.post(reverse("job_retry", args=[job.pk]), follow=True)
    assert "you have 1 jobs that wait; allowed: at most 1" in answer.content.decode()


def test_a_request_that_the_state_forbids_is_explained(browser: Client, job: Job) -> None:
    answer = browser.post(reverse("job_resume", args=[job.pk]), follow=True)
    assert f"cannot resume job {job.pk}: it is queued; allowed: paused" in answer.content.decode()


@pytest.mark.parametrize("tab", ["plan", "checkpoints", "samples", "logs", "events", "files"])
def test_a_tab_has_an_address(browser: Client, job: Job, tab: str) -> None:
    answer = browser.get(reverse("job", args=[job.pk]), {"tab": tab})
    assert answer.context["tab"] == tab
    assert f'id="tab-{tab}"' in answer.content.decode()


def test_a_tab_without_javascript_leads_to_the_whole_page(browser: Client, job: Job) -> None:
    answer = browser.get(reverse("job_tab", args=[job.pk, "events"]))
    assert answer["Location"] == f"/jobs/{job.pk}/?tab=events"


def test_the_plan_tab_sets_predicted_beside_measured(browser: Client, job: Job) -> None:
    attempt = rows.start(job)
    record_samples(attempt, [rows.step_record(attempt, step) for step in range(1, 10)])
    shown = {row.category: row for row in browser.get(reverse("job", args=[job.pk])).context["rows"]}
    assert shown["activations"].predicted_bytes == 176 * MIB
    assert shown["activations"].measured_bytes == 178 * MIB
    assert shown["activations"].lifetime == "2 kept, 6 recomputed, 4 offloaded blocks"
    peak = browser.get(reverse("job", args=[job.pk])).context["comparisons"][0]
    assert (peak.measured, peak.error) == ("411 MiB", "−0.5 %")
    assert shown["activations"].place == "host for 4 of 12 blocks"


@pytest.fixture
def write_log(job: Job, settings: Settings) -> Callable[..., None]:
    """Append to an attempt's log."""

    def write(text: str, *, attempt: int = 1) -> None:
        folder = settings.HEADROOM_HOME / "jobs" / job.pk / "attempts" / str(attempt)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log.txt").open("a") as file:
            file.write(text)

    return write


def log_after(browser: Client, job: Job, *, attempt: int, end: int) -> str:
    answer = browser.get(reverse("job_log", args=[job.pk]), {"attempt": attempt, "end": end})
    assert answer.status_code == 200
    return answer.content.decode()


def test_the_log_tab_shows_the_log_and_asks_for_what_follows(
    browser: Client, job: Job, write_log: Callable[..., None]
) -> None:
    rows.start(job)
    write_log("step 1 of 120\n")
    text = page_of(browser, job, tab="logs")
    assert "step 1 of 120" in text
    assert f'hx-get="{reverse("job_log", args=[job.pk])}?attempt=1&amp;end=14" hx-trigger="every 2s"' in text


def test_what_follows_a_log_is_whole_lines_and_the_next_question(
    browser: Client, job: Job, write_log: Callable[..., None]
) -> None:
    rows.start(job)
    write_log("one\ntwo\nthr")
    assert log_after(browser, job, attempt=1, end=4).startswith("two\n<span hx-get=")
    assert "end=8&quot;" not in log_after(browser, job, attempt=1, end=8)
    write_log("ee\n")
    assert log_after(browser, job, attempt=1, end=8).startswith("three\n<span")


def test_a_log_goes_on_with_the_next_attempts(browser: Client, job: Job, write_log: Callable[..., None]) -> None:
    write_log("first\n")
    write_log("second\n", attempt=2)
    Job.objects.filter(pk=job.pk).update(attempt=2)
    text = log_after(browser, job, attempt=1, end=6)
    assert "--- attempt 2 ---\nsecond\n" in text
    assert "attempt=2&amp;end=7" in text


def test_the_log_of_an_ended_job_asks_no_more(browser: Client, job: Job, write_log: Callable[..., None]) -> None:
    fail_for_memory(job)
    write_log("the end\n")
    assert "hx-trigger=\"every 2s\"" not in page_of(browser, job, tab="logs")
    assert "the end" in log_after(browser, job, attempt=1, end=0)
    assert "hx-get" not in log_after(browser, job, attempt=1, end=8)


def test_a_log_is_searched_in_any_case_and_through_all_attempts(
    browser: Client, job: Job, write_log: Callable[..., None]
) -> None:
    write_log("loading\nWarning: slow\n")
    write_log("a warning <b>again</b>\n", attempt=2)
    Job.objects.filter(pk=job.pk).update(attempt=2)
    text = page_of(browser, job, tab="logs", q="WARNING")
    assert "2 lines with “WARNING”" in text
    assert '<span class="muted">1:2</span> Warning: slow' in text
    assert '<span class="muted">2:1</span> a warning &lt;b&gt;again&lt;/b&gt;' in text
    assert "loading</pre>" not in text


def test_a_log_that_leads_out_of_the_home_is_not_shown(
    browser: Client, job: Job, settings: Settings, tmp_path: Path
) -> None:
    attempt = rows.start(job)
    folder = settings.HEADROOM_HOME / "jobs" / job.pk / "attempts" / str(attempt.number)
    folder.mkdir(parents=True)
    (tmp_path / "secret").write_text("the key")
    (folder / "log.txt").symlink_to(tmp_path / "secret")
    assert "the key" not in page_of(browser, job, tab="logs")


def test_the_csv_of_a_chart_holds_every_step_exactly(browser: Client, job: Job) -> None:
    attempt = rows.start(job)
    records = [rows.step_record(attempt, step) for step in range(1, 700)]
    record_samples(attempt, records)
    answer = browser.get(reverse("job_csv", args=[job.pk, "memory"]))
    lines = list(csv.reader(io.StringIO(answer.content.decode())))
    assert answer["Content-Disposition"] == f'attachment; filename="{job.pk}-memory.csv"'
    assert lines[0][:3] == ["step", "peak (bytes)", "weights (bytes)"]
    assert [int(line[1]) for line in lines[1:]] == [record["device_peak_bytes"] for record in records]


def test_the_table_of_a_chart_says_how_many_rows_it_leaves_out(browser: Client, job: Job) -> None:
    attempt = rows.start(job)
    record_samples(attempt, [rows.step_record(attempt, step) for step in range(1, 511)])
    text = browser.get(reverse("job_table", args=[job.pk, "speed"])).content.decode()
    assert "10 rows are left out here" in text
    assert text.count("<tr>") == 501


def test_the_later_attempt_counts_for_a_step_measured_twice(browser: Client, job: Job) -> None:
    first = rows.start(job)
    record_samples(first, [dict(rows.step_record(first, 1), loss=9.0)])
    drained = {"outcome": "drained", "step": 1, "measured": None, "summary": {}, "artifacts": []}
    assert finish_attempt(first, result=drained, exit_code=75) == "drained"
    second = rows.start(job)
    record_samples(second, [dict(rows.step_record(second, 1), loss=5.0)])
    text = browser.get(reverse("job_csv", args=[job.pk, "loss"])).content.decode()
    assert text.splitlines()[1] == "1,5.0,,0.001"


def test_an_unknown_chart_is_not_there(browser: Client, job: Job) -> None:
    assert browser.get(reverse("job_csv", args=[job.pk, "everything"])).status_code == 404


def test_the_lanes_table_sets_what_was_predicted_above_what_was_measured(browser: Client, job: Job) -> None:
    attempt = rows.start(job)
    measured = {"lane_ms": {"compute": 1500.0, "copy_out": 80.0}, "stall_ms": {"copy_out": 80.0}, "data_wait_ms": 2.0}
    record_samples(attempt, [dict(rows.step_record(attempt, 1), **measured)])
    answer = browser.get(reverse("job_csv", args=[job.pk, "lanes"]))
    heads, predicted, first = csv.reader(io.StringIO(answer.content.decode()))
    assert heads[:4] == ["step", "compute (ms)", "copy in (ms)", "copy out (ms)"]
    assert predicted[:4] == ["predicted", "1600.0", "", "90.0"]
    assert dict(zip(heads, first, strict=True))["waits for copy out (ms)"] == "80.0"
    assert dict(zip(heads, first, strict=True))["waits for data (ms)"] == "2.0"


def test_the_cards_own_meters_have_a_table(browser: Client, job: Job) -> None:
    attempt = rows.start(job)
    card = {"use_percent": 87, "power_w": 141.5, "temperature_c": 61, "free_bytes": 5}
    record_samples(attempt, [rows.step_record(attempt, 1), dict(rows.step_record(attempt, 2), gpu=card)])
    text = browser.get(reverse("job_csv", args=[job.pk, "card"])).content.decode()
    assert text.splitlines() == ["step,use (%),power (W),temperature (°C),free (bytes)", "2,87,141.5,61,5"]


def test_a_job_can_be_copied_in_three_forms(browser: Client, job: Job) -> None:
    text = page_of(browser, job)
    for form in ("yaml", "cli", "curl"):
        assert f'id="copy-{form}"' in text
    assert "http://testserver/api/v1/jobs" in text


def test_the_yaml_to_copy_names_model_and_data_unless_a_name_means_another_row(browser: Client, job: Job) -> None:
    def copied() -> Any:
        copies = browser.get(f"/jobs/{job.pk}/").context["copies"]
        return yaml.safe_load(next(copy.text for copy in copies if copy.key == "yaml"))

    dataset = job.dataset
    assert dataset is not None
    Job.objects.filter(pk=job.pk).update(spec={**job.spec, "model": job.model_id, "dataset": dataset.pk})
    asked = copied()
    assert (asked["model"], asked["dataset"]) == (job.model.name, dataset.name)
    assert asked["goal"]["device_budget_bytes"] == "480 MiB"
    rows.make_model(job.owner, name=job.model.name)
    asked = copied()
    assert (asked["model"], asked["dataset"]) == (job.model_id, dataset.name)


def test_an_ended_job_has_a_last_step_and_a_running_one_has_a_now(browser: Client, job: Job) -> None:
    attempt = rows.start(job)
    assert '<th scope="col" class="right">Now</th>' in page_of(browser, job)
    result = rows.out_of_memory_result(moment="at step 3")
    finish_attempt(attempt, result=result, exit_code=1)
    text = page_of(browser, job)
    assert '<th scope="col" class="right">Last step</th>' in text
    assert '<th scope="col" class="right">Now</th>' not in text


def test_answers_stand_before_the_charts_and_a_plan_after_them(browser: Client, ada: User, job: Job) -> None:
    def order(shown: Job) -> list[str]:
        text = page_of(browser, shown)
        return sorted(("tab-panel", 'class="charts"'), key=lambda part: text.index(part))

    assert order(rows.make_generate_job(ada)) == ["tab-panel", 'class="charts"']
    assert order(job) == ['class="charts"', "tab-panel"]


def test_a_configuration_is_written_in_words(browser: Client, job: Job) -> None:
    workload = {**job.spec["workload"], "adapter": {"rank": 8, "alpha": None}, "tie": True, "seed": None, "stop": []}
    Job.objects.filter(pk=job.pk).update(spec={**job.spec, "workload": workload})
    shown = dict(browser.get(f"/jobs/{job.pk}/?tab=plan").context["work_pairs"])
    assert shown["adapter"] == "rank 8"
    assert shown["tie"] == "yes"
    assert shown["stop"] == "none"
    assert "seed" not in shown
    goal = dict(browser.get(f"/jobs/{job.pk}/?tab=plan").context["goal_pairs"])
    assert goal["device budget"] == "480 MiB"
    assert not {"None", "True", "False", "[]", "{}"} & {*shown.values(), *goal.values()}
