"""Compiled blocks on the pages: the form asks again while they are traced, the page of plans shows and edits a plan with them."""

import re
from html import unescape
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from optimizer.hardware.machine import COMPILER_FACT
from tests.webapp.conftest import MACHINE_DOCUMENT
from tests.webapp.planning.compiled.test_offered import LONG, keep_compiled
from webapp.catalog.actions import register_machine
from webapp.catalog.models import Dataset, Machine, Model
from webapp.jobs.models import Job

pytestmark = pytest.mark.django_db

WAITS = "A worker traces them now, once for this model; a better plan appears here by itself."


@pytest.fixture
def machine() -> Machine:
    return register_machine(name="bench", document={**MACHINE_DOCUMENT, "facts": {COMPILER_FACT: "g++"}})


@pytest.fixture
def typed(typed_work: dict[str, str], profiled_llama: Model, dataset: Dataset, machine: Machine) -> dict[str, Any]:
    rows_named = {"model": profiled_llama.pk, "dataset": dataset.pk}
    work = {"num_steps": str(LONG), "global_batch_size": "2", "device_budget": "1 GiB", "most_loss": "rounding"}
    return typed_work | rows_named | work


def words_of(answer: Any) -> str:
    assert answer.status_code == 200
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", answer.content.decode())).split())


def test_the_form_offers_what_there_is_and_asks_again_until_compiled_blocks_are_traced(
    browser: Client, typed: dict[str, Any], compiled_document: dict[str, Any]
) -> None:
    answer = browser.post(reverse("job_price"), typed)
    assert WAITS in words_of(answer)
    assert answer.context["pricing"].kind == "priced"
    assert 'hx-trigger="load delay:5s"' in answer.content.decode()
    keep_compiled(compiled_document)
    answer = browser.post(reverse("job_price"), typed)
    assert WAITS not in words_of(answer)
    assert "Op by op the run would take" in words_of(answer)
    assert 'hx-trigger="load delay:5s"' not in answer.content.decode()
    assert answer.context["pricing"].suggestions


def test_a_job_that_is_started_before_they_are_traced_waits_unless_its_plan_was_taken(
    browser: Client, typed: dict[str, Any]
) -> None:
    answer = browser.post(reverse("job_price"), typed)
    browser.post(reverse("job_new"), typed | {"name": "taken", "plan_id": answer.context["pricing"].best.id})
    browser.post(reverse("job_new"), typed | {"name": "free"})
    assert {job.spec["name"]: job.awaits_plan for job in Job.objects.filter(kind="train")} == {"taken": False, "free": True}


def test_the_page_of_plans_shows_edits_and_lists_changes_of_a_compiled_plan(
    browser: Client, typed: dict[str, Any], machine: Machine, compiled_document: dict[str, Any]
) -> None:
    asked = typed | {"on": machine.pk}
    shown = words_of(browser.get(reverse("plans"), asked))
    assert "Blocks are not compiled: a worker traces compiled blocks now" in shown
    assert WAITS in shown
    assert browser.get(reverse("plans"), asked | {"waits": "compiled"}).status_code == 204
    edit = {"try-pin_kernels_blocks": "compiled"}
    assert "a worker traces compiled blocks now" in words_of(browser.get(reverse("plans"), asked | edit))
    keep_compiled(compiled_document)
    assert browser.get(reverse("plans"), asked | {"waits": "compiled"}).headers["HX-Refresh"] == "true"
    assert browser.get(reverse("plans"), asked | edit).context["look"].edited == []
    shown = words_of(browser.get(reverse("plans"), asked))
    assert "Op by op the run would take" in shown
    assert WAITS not in shown
    assert "Recompute every block" in words_of(browser.get(reverse("plans_knobs"), asked))
    edit = {"try-pin_kernels_blocks": "memory_saving"}
    (change,) = browser.get(reverse("plans"), asked | edit).context["look"].edited
    assert "blocks" in change
