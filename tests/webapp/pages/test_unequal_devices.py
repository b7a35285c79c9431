"""Pages of a machine with devices of several kinds: its plans, its jobs and itself."""

import re
from html import unescape

import pytest
from django.contrib.auth.models import User
from django.http import HttpResponse
from django.test import Client
from django.urls import reverse

from optimizer.base.errors import InvalidPlan
from optimizer.base.units import GIB, MIB
from optimizer.hardware.machine import Machine as MachineSpec
from optimizer.hardware.mixed import play_devices
from tests.webapp.conftest import MACHINE_DOCUMENT, make_spec
from webapp.catalog.actions import register_machine
from webapp.catalog.models import Dataset, Machine, Model
from webapp.pages.shown.job_head import budget_bytes
from webapp.pages.shown.rank_rows import rank_rows
from webapp.planning.pricing import price_spec
from webapp.planning.submitting import submit_job

pytestmark = pytest.mark.django_db

SMALL, LARGE = "CPU with 64.0 MiB", "CPU with 1.00 GiB"
ON_BOTH = {"device_budget_bytes": GIB, "num_devices": 2, "pins": {"layout": {"num_devices": 2}}}
WORKLOAD = {"sequence_length": 128, "global_batch_size": 8, "num_steps": 10}


@pytest.fixture
def uneven() -> Machine:
    machine = play_devices(MachineSpec.from_json(MACHINE_DOCUMENT), [64 * MIB, GIB])
    return register_machine(name="uneven", document=machine.to_json())


def words(answer: HttpResponse) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", answer.content.decode())).split())


def test_the_plans_page_names_the_devices_of_the_plan_and_says_why_no_single_change_is_priced(
    browser: Client, uneven: Machine, profiled_llama: Model
) -> None:
    asked = {
        "model": profiled_llama.pk,
        "sequence_length": "128",
        "global_batch_size": "8",
        "device_budget": "1 GiB",
        "num_devices": "2",
        "pin_layout_num_devices": "2",
        "on": uneven.pk,
    }
    page = browser.get(reverse("plans"), asked)
    assert page.status_code == 200
    shown = words(page)
    assert f"on {SMALL} and {LARGE};" in shown or f"on {LARGE} and {SMALL};" in shown
    knobs = browser.get(reverse("plans_knobs"), asked)
    assert knobs.status_code == 200
    assert "Single changes are not priced on devices of several kinds" in words(knobs)


def test_the_plans_page_shows_what_setups_that_people_write_by_hand_take(
    browser: Client, pair: Machine, profiled_llama: Model
) -> None:
    asked = {"model": profiled_llama.pk, "sequence_length": "128", "global_batch_size": "8", "device_budget": "1 GiB"}
    shown = words(browser.get(reverse("plans"), {**asked, "num_devices": "2", "on": pair.pk}))
    assert "FSDP (ZeRO-3): weights, gradients and state shared out; every block recomputed" in shown
    assert "Setups of several devices that cannot be had here" in shown
    assert "a device's part of each block was not traced" in shown
    alone = words(browser.get(reverse("plans"), {**asked, "num_devices": "1", "on": pair.pk}))
    assert "FSDP" not in alone
    assert "Setups of several devices" not in alone


def test_the_job_page_draws_each_rank_against_its_own_device(
    browser: Client, ada: User, uneven: Machine, profiled_llama: Model, dataset: Dataset
) -> None:
    spec = make_spec(profiled_llama, dataset, goal=ON_BOTH, workload=WORKLOAD)
    job = submit_job(ada, spec=spec, actor="user:ada")
    rows = {row.part.split(",")[0]: row for row in rank_rows(job)}
    assert rows[SMALL].summary.endswith("of 64.0 MiB")
    assert rows[LARGE].summary.endswith("of 1.00 GiB")
    shown = words(browser.get(reverse("job", args=[job.pk])))
    assert f"{SMALL}, " in shown
    assert "Against the budget Measured" in shown
    assert budget_bytes(job) == 64 * MIB


def test_machine_pages_and_the_api_name_every_kind(browser: Client, uneven: Machine) -> None:
    for address in (reverse("machines"), reverse("machine", args=[uneven.pk])):
        assert f"2 devices with 1x {SMALL}, 1x {LARGE}" in words(browser.get(address))
    (row,) = browser.get("/api/v1/machines").json()["results"]
    assert [(kind["device"]["name"], kind["num_devices"]) for kind in row["others"]] == [(LARGE, 1)]


def test_a_pin_that_one_machine_cannot_keep_leaves_the_others_plans(
    ada: User, uneven: Machine, pair: Machine, profiled_llama: Model, dataset: Dataset
) -> None:
    goal = {"device_budget_bytes": GIB, "num_devices": 2, "pins": {"layout": {"num_devices": 2, "data": "zero3"}}}
    spec = make_spec(profiled_llama, dataset, goal=goal, workload=WORKLOAD)
    offers = price_spec(ada, spec).offers
    assert {offer.row.machine_id for offer in offers if offer.row.label == "chosen"} == {pair.pk}
    pair.delete()
    with pytest.raises(InvalidPlan):
        price_spec(ada, spec)
