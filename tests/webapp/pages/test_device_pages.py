"""Pages of several devices: the form's field, a job's devices, a machine's."""

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from optimizer.base.units import format_bytes
from tests.webapp.attempts.claims.test_gangs import make_host
from tests.webapp.conftest import MACHINE_DOCUMENT, make_bench, make_spec
from webapp.attempts.claiming import claim_job
from webapp.attempts.records import record_progress, record_started
from webapp.catalog.models import Dataset, Machine, Model
from webapp.jobs.actions import create_job
from webapp.jobs.models import Job
from webapp.jobs.specs.joining import link_words
from webapp.pages.shown.offer_rows import offer_rows
from webapp.pages.shown.rank_rows import rank_rows
from webapp.planning.pricing import price_spec
from webapp.planning.submitting import submit_job

pytestmark = pytest.mark.django_db


@pytest.fixture
def on_two(ada: User, pair: Machine, profiled_llama: Model, dataset: Dataset) -> Job:
    goal = {"device_budget_bytes": 2**30, "num_devices": 2, "pins": {"layout": {"num_devices": 2, "data": "zero1"}}}
    workload = {"sequence_length": 128, "global_batch_size": 4, "num_steps": 10}
    return submit_job(ada, spec=make_spec(profiled_llama, dataset, goal=goal, workload=workload), actor="user:ada")


def test_the_page_of_a_new_job_says_beside_the_field_what_is_wrong_with_it(
    browser: Client, pair: Machine, profiled_llama: Model, dataset: Dataset, typed_work: dict[str, str]
) -> None:
    shown = browser.get(reverse("job_new")).content.decode()
    assert "Devices, at most" in shown
    typed: dict[str, Any] = {**typed_work, "model": profiled_llama.pk, "dataset": dataset.pk, "device_budget": "1 GiB"}
    answer = browser.post(reverse("job_price"), {**typed, "num_devices": "3"}).content.decode()
    assert "Devices, at most" in answer
    assert "the machines here have at most 2 devices" in answer


def test_a_clone_keeps_the_devices_and_its_price_names_them(browser: Client, ada: User, on_two: Job) -> None:
    shown = browser.get(reverse("job_new"), {"from": on_two.pk}).content.decode()
    assert 'name="num_devices" value="2"' in shown
    assert 'name="pin_layout_num_devices" value="2"' in shown
    asked = {name: on_two.spec[name] for name in ("model", "dataset", "workload", "goal")}
    offers = price_spec(ada, asked).to_json()["offers"]
    row = offer_rows(offers, budget_bytes=2**30, selected="")[0]
    assert row.chosen
    assert row.layout == "on 2 devices, optimizer state shared (ZeRO-1)"
    assert row.name.startswith("On 2 devices, optimizer state shared (ZeRO-1)")


def test_the_job_page_says_what_unequal_ranks_take_of_a_step_and_which_is_the_slowest(browser: Client, on_two: Job) -> None:
    common = {"device": "cpu", "memory_bytes": 2**30, "peak_bytes": 2**20, "peak_high_bytes": 2**21}
    ranks = [{**common, "num_sequences": 1, "step_ms": 1234.4}, {**common, "num_sequences": 3, "step_ms": 1200.0}]
    Job.objects.filter(pk=on_two.pk).update(prediction={**on_two.prediction, "ranks": ranks})
    text = browser.get(reverse("job", args=[on_two.pk])).content.decode()
    assert "rank 0: cpu, 1 sequence of a step, 1,234 ms, the slowest" in text
    assert "rank 1: cpu, 3 sequences of a step, 1,200 ms<" in text


def test_the_job_page_says_how_long_each_unequal_stage_works(browser: Client, on_two: Job) -> None:
    common = {"memory_bytes": 2**30, "peak_bytes": 2**20, "peak_high_bytes": 2**21, "num_sequences": 4}
    ranks = [{**common, "device": "small", "step_ms": 310.0}, {**common, "device": "large", "step_ms": 450.0}]
    devices = [{"device": "small"}, {"device": "large"}]
    layout = {**on_two.plan["layout"], "data": "replicated", "stage_blocks": [1, 3], "ranks": devices}
    documents = {"plan": {**on_two.plan, "layout": layout}, "prediction": {**on_two.prediction, "ranks": ranks}}
    Job.objects.filter(pk=on_two.pk).update(**documents)
    text = browser.get(reverse("job", args=[on_two.pk])).content.decode()
    assert "rank 0, block 1: small, at work for 310 ms of a step<" in text
    assert "rank 1, blocks 2 to 4: large, at work for 450 ms of a step, the slowest" in text


def test_the_job_page_shows_each_devices_peak_the_fullest_first(browser: Client, on_two: Job, pair: Machine) -> None:
    attempt = claim_job(worker="w", machine=pair)
    assert attempt is not None
    record_started(attempt, pid=1)
    record_progress(attempt, step=1, eta_s=None, summary={"rank_peak_bytes": [100 * 2**20, 120 * 2**20]})
    text = browser.get(reverse("job", args=[on_two.pk])).content.decode()
    assert "On 2 devices, optimizer state shared (ZeRO-1), on pair" in text
    table = text[text.index("Peak of each device") :]
    assert table.index("device 1") < table.index("device 0")
    assert "rank 1: 120 MiB measured" in table
    fragment = browser.get(reverse("job_ranks", args=[on_two.pk])).content.decode()
    assert "every 3s" in fragment


def test_the_page_of_a_job_over_two_machines_names_both_and_each_ranks_device(
    browser: Client, ada: User, profiled_llama: Model, dataset: Dataset
) -> None:
    hosts = [make_host(1, name="home"), make_host(2, name="office")]
    card = MACHINE_DOCUMENT["device"]["name"]
    layout = {"num_devices": 3, "data": "zero1", "ranks": [{"device": f"{card}@{name}"} for name in ("home", "office", "office")]}
    spec = make_spec(profiled_llama, dataset, machines=["home", "office"], link="1Gbit,1ms")
    whose = {"owner": ada, "model": profiled_llama, "dataset": dataset, "machine": hosts[0], "actor": "user:ada"}
    job = create_job(spec=spec, plan={"layout": layout}, prediction=None, **whose)
    assert [row.place for row in rank_rows(job)] == [None, None, None]
    assert claim_job(worker="w", machine=hosts[0]) is not None
    assert [row.place for row in rank_rows(job)] == [0, 0, 1]
    text = browser.get(reverse("job_ranks", args=[job.pk])).content.decode()
    assert "on home and office, with a network of 1Gbit,1ms as stated." in text
    job.spec["link_measured_at"] = "2026-11-28T01:02:03Z"
    assert link_words(job.spec) == "1Gbit,1ms as their workers measured it on 2026-11-28 at 01:02 UTC"
    assert "not started" not in text


def test_a_job_of_one_device_has_no_such_table(browser: Client, make_job: Callable[..., Job]) -> None:
    job = make_job()
    assert "Peak of each device" not in browser.get(reverse("job", args=[job.pk])).content.decode()


def test_the_pages_of_machines_and_the_api_say_how_many_devices_there_are(browser: Client, pair: Machine) -> None:
    words = "2 devices with 8.00 GiB together, linked by the loopback interface (1.0 GB/s, measured here)"
    for address in (reverse("machines"), reverse("machine", args=[pair.pk])):
        assert words.replace("'", "&#x27;") in browser.get(address).content.decode()
    (row,) = browser.get("/api/v1/machines").json()["results"]
    assert (row["num_devices"], row["peers"]["kind"]) == (2, "loopback")


def test_the_page_of_a_model_that_is_cut_holds_the_first_stage_against_its_own_prediction(
    browser: Client, ada: User, pair: Machine, profiled_llama: Model, dataset: Dataset
) -> None:
    goal = {"device_budget_bytes": 2**30, "pins": {"layout": {"num_devices": 2, "stage_blocks": [1, 3]}}, "num_devices": 2}
    workload = {"sequence_length": 128, "global_batch_size": 4, "num_steps": 10}
    job = submit_job(ada, spec=make_spec(profiled_llama, dataset, goal=goal, workload=workload), actor="user:ada")
    first, second = job.prediction["rank_peak_bytes"]
    assert first < second == job.prediction["device_peak_bytes"]
    page = browser.get(reverse("job", args=[job.pk]))
    text = page.content.decode()
    assert "On 2 devices, cut into 1 + 3 blocks" in text
    assert "rank 0, block 1<" in text
    assert "rank 1, blocks 2 to 4<" in text
    assert "Device memory of rank 0" in text
    assert "Predicted at the peak, fullest device" in text
    assert page.context["facts"]["devices_differ"] is True
    assert f"predicted {format_bytes(first)}" in page.context["pictures"].strip.summary


def test_the_form_asks_for_machines_where_there_are_several_and_a_clone_keeps_them(
    browser: Client, ada: User, profiled_llama: Model, dataset: Dataset, typed_work: dict[str, str]
) -> None:
    make_bench("home")
    assert 'name="machines"' not in browser.get(reverse("job_new")).content.decode()
    make_bench("office")
    over_two: dict[str, Any] = {"goal": {"device_budget_bytes": 2**30}, "machines": ["home", "office"], "link": "1Gbit,1ms"}
    job = submit_job(ada, spec=make_spec(profiled_llama, dataset, **over_two), actor="user:ada")
    shown = browser.get(reverse("job_new"), {"from": job.pk}).content.decode()
    assert 'name="machines" value="home, office"' in shown
    assert 'name="link" value="1Gbit,1ms"' in shown
    typed: dict[str, Any] = {**typed_work, "model": job.model_id, "dataset": job.dataset_id, "device_budget": "1 GiB"}
    typed |= {"machines": "home, office", "link": "1Gbit,1ms"}
    assert "is not there; those that are: home, office" in browser.post(
        reverse("job_price"), {**typed, "machines": "home, attic"}
    ).content.decode()
    priced = browser.post(reverse("job_price"), typed).content.decode()
    assert f"{MACHINE_DOCUMENT['device']['name']}@home" in priced
