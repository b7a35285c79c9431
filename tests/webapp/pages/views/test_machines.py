"""The pages of machines, and what the API says of one."""

from datetime import timedelta

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from optimizer.hardware.machine import PROBE_DISTURBED_FACT
from tests.webapp.conftest import make_bench
from tests.webapp.pages import rows
from webapp.attempts.outcome import finish_attempt
from webapp.attempts.records import record_samples
from webapp.catalog.models import Link, Machine
from webapp.jobs.fleet import Within
from webapp.jobs.links.probing import ask_for_links, record_failure, record_measured
from webapp.jobs.models import Job, Member
from webapp.pages.shown.machines.device_bar import within_words

pytestmark = pytest.mark.django_db


def run_to_the_end(owner: User, *, name: str = "kjv-demo", peak_bytes: int, step_ms: float = 1650.0) -> Job:
    attempt = rows.start(rows.make_job(owner, name=name))
    measured = {"device_peak_bytes": peak_bytes, "step_ms": step_ms, "num_steps": rows.NUM_STEPS}
    result = {"outcome": "succeeded", "reason": "done", "message": "", "error": None, "step": 120, "measured": measured}
    finish_attempt(attempt, result=result, exit_code=0)
    return attempt.job


def text_of(browser: Client, path: str) -> str:
    answer = browser.get(path)
    assert answer.status_code == 200
    return answer.content.decode()


def test_without_a_machine_the_page_says_where_one_comes_from(browser: Client) -> None:
    assert "No machine yet" in text_of(browser, "/machines/")


def test_a_machine_says_what_it_is_and_whether_it_is_there(browser: Client) -> None:
    machine = rows.make_machine()
    Machine.objects.filter(pk=machine.pk).update(last_seen_at=timezone.now() - timedelta(hours=1))
    text = text_of(browser, "/machines/")
    assert ">offline<" in text
    assert "8.00 GiB of 8.00 GiB free; no job is running" in text
    assert "No run has finished here yet" in text
    assert "90 GFLOP/s" in text_of(browser, f"/machines/{machine.pk}/")


def test_a_job_at_work_is_drawn_where_it_holds_memory(browser: Client, ada: User) -> None:
    attempt = rows.start(rows.make_job(ada))
    machine = attempt.machine
    assert "not measured yet" in text_of(browser, f"/machines/{machine.pk}/")
    record_samples(attempt, [rows.step_record(attempt, 1), rows.step_record(attempt, 2)])
    text = text_of(browser, f"/machines/{machine.pk}/")
    assert "kjv-demo: optimizer state" in text
    assert f"/jobs/{attempt.job_id}/" in text
    memory = browser.get(f"/api/v1/machines/{machine.pk}").json()["memory"]
    assert memory["holders"][0]["bytes_by_category"] == rows.step_record(attempt, 2)["device_bytes"]
    assert memory["free_bytes"] == memory["memory_bytes"] - attempt.job.need_device_bytes


def test_someone_else_s_job_shows_its_bytes_and_not_its_name(browser: Client, eve: User) -> None:
    attempt = rows.start(rows.make_job(eve, name="secret"))
    record_samples(attempt, [rows.step_record(attempt, 1)])
    run_to_the_end(eve, name="secret too", peak_bytes=400 * 1024**2)
    for path in ("/machines/", f"/machines/{attempt.machine_id}/", f"/api/v1/machines/{attempt.machine_id}"):
        text = text_of(browser, path)
        assert "secret" not in text
        assert attempt.job_id not in text
    assert "someone else&#x27;s job" in text_of(browser, f"/machines/{attempt.machine_id}/")


def test_finished_runs_say_how_well_they_were_predicted(browser: Client, ada: User) -> None:
    predicted_bytes = sum(rows.PEAK.values())
    run_to_the_end(ada, peak_bytes=predicted_bytes)
    job = run_to_the_end(ada, name="off", peak_bytes=round(predicted_bytes / 1.02), step_ms=1500.0)
    assert "peak memory was predicted <strong class=\"num\">within 2 % over 2 runs" in text_of(browser, "/machines/")
    machine = Machine.objects.get()
    accuracy = browser.get(f"/api/v1/machines/{machine.pk}").json()["accuracy"]
    assert accuracy["step"]["worst"] == pytest.approx(0.1)
    assert [run["name"] for run in accuracy["runs"]] == ["off", "kjv-demo"]
    assert accuracy["runs"][0]["measured_bytes"] == round(predicted_bytes / 1.02)
    page = text_of(browser, f"/machines/{machine.pk}/")
    assert "Learnt from 2 runs" in page
    assert f'<a href="/jobs/{job.pk}/">off</a>' in page


def test_many_runs_are_summed_up_by_nine_in_ten_and_the_worst() -> None:
    found = Within(num_runs=37, nine_of_ten=0.0123, worst=0.2)
    assert within_words(found) == "within 1.2 % in 90 % of 37 runs (worst 20 %)"


def test_an_unknown_machine_is_not_there(browser: Client) -> None:
    assert browser.get("/machines/none/").status_code == 404
    assert browser.get("/api/v1/machines/none").status_code == 404


def test_a_refresh_sends_the_live_part_alone(browser: Client) -> None:
    machine = rows.make_machine()
    for path in ("/machines/", f"/machines/{machine.pk}/"):
        assert "<html" not in browser.get(path, headers={"HX-Request": "true"}).content.decode()


def test_a_machine_that_others_used_while_it_was_measured_says_that_its_rates_are_uncertain(browser: Client) -> None:
    machine = rows.make_machine()
    path = f"/machines/{machine.pk}/"
    assert "Uncertain" not in text_of(browser, path)
    told = "others used the processor while it was measured"
    Machine.objects.filter(pk=machine.pk).update(document={**machine.document, "facts": {PROBE_DISTURBED_FACT: told}})
    assert f"<b>Uncertain:</b> {told}." in text_of(browser, path)


def test_what_generations_taught_is_shown_beside_what_training_did(browser: Client) -> None:
    machine = rows.make_machine()
    taught = {"num_runs": 3, "time_factors": {"attention": 1.234}}
    Machine.objects.filter(pk=machine.pk).update(calibration={"generations": taught})
    text = text_of(browser, f"/machines/{machine.pk}/")
    assert "Generations have factors of their own, learnt from 3 generate jobs" in text
    assert "× 1.23" in text
    assert "None yet" not in text


def test_a_run_over_several_machines_says_nothing_of_the_one_that_led_it(browser: Client, ada: User) -> None:
    job = run_to_the_end(ada, peak_bytes=sum(rows.PEAK.values()))
    machine = Machine.objects.get()
    assert browser.get(f"/api/v1/machines/{machine.pk}").json()["accuracy"]["runs"]
    Member.objects.create(attempt=job.attempts.get(), machine_name="office", ranks=[1], devices=[0], device_bytes=[1])
    assert browser.get(f"/api/v1/machines/{machine.pk}").json()["accuracy"] == {"peak": None, "step": None, "runs": []}


def test_the_page_shows_the_network_to_each_other_machine_and_measures_it_again(browser: Client) -> None:
    here, there = rows.make_machine(), make_bench("office")
    path = f"/machines/{here.pk}/"
    assert "No other machine has registered yet" in text_of(browser, path)
    ask_for_links(here)
    assert "not known yet" in text_of(browser, path)
    record_measured(Link.objects.get(), round_trip_s=0.002, bytes_per_s_by_size=((65536, 5e7), (16777216, 1e9 / 8 * 1448 / 1514)))
    text = text_of(browser, path)
    assert "1Gbit,1ms" in text
    assert "50 MB/s" in text
    assert "due; measured once" not in text
    assert f"{there.name}: 1Gbit,1ms (measured" in text_of(browser, "/machines/")
    assert browser.post(f"{path}links/").status_code == 302
    assert "due; measured once both machines are idle" in text_of(browser, path)
    (link,) = browser.get(f"/api/v1/machines/{here.pk}").json()["links"]
    assert (link["machine"], link["link"], link["is_due"]) == (there.name, "1Gbit,1ms", True)
    record_failure(Link.objects.get(), "office cannot reach home at 10.0.0.2, port 40000: no answer within 5 s")
    text = text_of(browser, path)
    assert "office cannot reach home at 10.0.0.2, port 40000: no answer within 5 s." in text
    assert "not reached" in text_of(browser, "/machines/")
