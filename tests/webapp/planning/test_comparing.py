"""Jobs side by side: what differs, what came of it, and what each decision of another plan would cost the first."""

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User

from optimizer.base.errors import InvalidInput
from optimizer.estimate.prediction import Prediction
from optimizer.estimate.training import estimate_training
from optimizer.hardware.machine import Machine
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from tests.webapp.conftest import make_spec
from webapp.catalog.models import Dataset, Model
from webapp.jobs.models import Job
from webapp.jobs.specs.training import read_workload
from webapp.planning.runs.comparing import MAX_JOBS, compare_jobs, read_jobs

pytestmark = pytest.mark.django_db


def planned(num_blocks: int, choice: str = "keep", **parts: Any) -> dict[str, Any]:
    return {
        **Plan.from_json(
            {"batch": {"micro_batch_size": 2, "accumulation_steps": 1}, "activations": {"per_block": [choice] * num_blocks}}
        ).to_json(),
        **parts,
    }


@pytest.fixture
def make_run(
    make_job: Callable[..., Job], profiled_llama: Model, llama_document: dict[str, Any], dataset: Dataset
) -> Callable[..., Job]:
    """A job of a model that has its profile, with a plan of its own."""
    num_blocks = Profile.from_json(llama_document).num_blocks

    def make(choice: str = "keep", *, workload: dict[str, Any] | None = None, **parts: Any) -> Job:
        spec = make_spec(profiled_llama, dataset)
        spec["workload"] |= workload or {}
        return make_job(model=profiled_llama, spec=spec, plan=planned(num_blocks, choice, **parts))

    return make


def test_only_differences_are_reported(make_run: Callable[..., Job]) -> None:
    a, b = make_run(), make_run("recompute", workload={"num_steps": 20})
    found = compare_jobs([a, b])
    assert [(each.group, each.name, each.values) for each in found.differences] == [
        ("setting", "workload.num_steps", (10, 20)),
        ("plan", "activations, lifetime", ("keep 4", "recompute 4")),
    ]


def test_jobs_asked_for_alike_differ_in_nothing(make_run: Callable[..., Job]) -> None:
    assert compare_jobs([make_run(), make_run()]).differences == ()


def test_settings_that_only_one_kind_of_job_has_are_no_difference(
    make_run: Callable[..., Job], make_job: Callable[..., Job], profiled_llama: Model
) -> None:
    a, b = make_run(workload={"optimizer": "adamw"}), make_run(workload={"optimizer": "adamw", "num_steps": 20})
    asked = {"workload": {"max_new_tokens": 8}, "goal": a.spec["goal"]}
    c = make_job(kind="generate", model=profiled_llama, dataset=a.dataset, spec=asked)
    assert [(each.name, each.values) for each in compare_jobs([a, b, c]).differences] == [
        ("kind", ("train", "train", "generate")),
        ("workload.num_steps", (10, 20, None)),
    ]


def test_a_decision_costs_what_the_estimate_says_of_it_alone(
    make_run: Callable[..., Job], llama_document: dict[str, Any]
) -> None:
    a, b = make_run(), make_run("recompute", optimizer_state={"bits": 8})
    found = compare_jobs([a, b])
    profile, machine = Profile.from_json(llama_document), Machine.from_json(a.machine.document)

    def price(document: dict[str, Any]) -> Prediction:
        return estimate_training(
            profile, plan=Plan.from_json(document), workload=read_workload(a.spec["workload"]), machine=machine
        )

    before = price(a.plan)
    for cost in found.costs:
        after = price({**a.plan, cost.decision: b.plan[cost.decision]})
        assert cost.job_index == 1
        assert cost.device_change_bytes == after.device_peak_bytes - before.device_peak_bytes
        assert cost.step_change_ms == after.step_ms - before.step_ms
        assert cost.tokens_per_s_change == after.tokens_per_s - before.tokens_per_s
    assert {cost.decision for cost in found.costs} == {"activations", "optimizer_state"}


def test_a_setting_costs_what_the_first_jobs_plan_would_with_it(
    make_run: Callable[..., Job], llama_document: dict[str, Any]
) -> None:
    a, b = make_run(), make_run(workload={"sequence_length": 16, "num_steps": 20})
    (cost,) = compare_jobs([a, b]).costs
    profile, machine = Profile.from_json(llama_document), Machine.from_json(a.machine.document)

    def price(workload: dict[str, Any] | None) -> Prediction:
        return estimate_training(profile, plan=Plan.from_json(a.plan), workload=read_workload(workload), machine=machine)

    before, after = price(a.spec["workload"]), price({**a.spec["workload"], "sequence_length": 16})
    assert cost.decision == "workload.sequence_length"
    assert cost.device_change_bytes == after.device_peak_bytes - before.device_peak_bytes
    assert cost.tokens_per_s_change == after.tokens_per_s - before.tokens_per_s


def test_a_larger_batch_is_priced_with_the_cut_that_its_job_gave_it(make_run: Callable[..., Job]) -> None:
    batch = {"micro_batch_size": 2, "accumulation_steps": 2}
    a, b = make_run(), make_run(workload={"global_batch_size": 4}, batch=batch)
    priced = {cost.decision: cost for cost in compare_jobs([a, b]).costs}
    assert priced["workload.global_batch_size"].step_change_ms > 0


def test_another_machine_has_a_price(make_run: Callable[..., Job], machine: Any) -> None:
    a, b = make_run(), make_run()
    document = {**machine.document, "rates": {**machine.document["rates"], "memory_bytes_per_s": 1e6}}
    b.machine = type(machine).objects.create(name="slow", document=document, last_seen_at=machine.last_seen_at)
    b.save()
    (cost,) = compare_jobs([a, b]).costs
    assert cost.decision == "machine"
    assert cost.tokens_per_s_change < 0


def test_without_a_profile_nothing_is_priced_and_the_reason_is_given(make_job: Callable[..., Job]) -> None:
    found = compare_jobs([make_job(plan=planned(2)), make_job(plan=planned(2, "recompute"))])
    assert found.costs == ()
    assert "no profile" in found.unpriced


def test_a_job_without_a_plan_stands_beside_those_that_have_one(
    make_run: Callable[..., Job], make_job: Callable[..., Job]
) -> None:
    found = compare_jobs([make_run(), make_run("recompute"), make_job(plan=None)])
    cells = {each.name: each.values for each in found.differences if each.group == "plan"}
    assert cells == {"activations, lifetime": ("keep 4", "recompute 4", None)}


def test_outcomes_are_those_that_some_job_has(make_run: Callable[..., Job]) -> None:
    a, b = make_run(), make_run()
    Job.objects.filter(pk=a.pk).update(summary={"loss": 2.5, "device_peak_bytes": 100}, step=4)
    a.refresh_from_db()
    outcomes = {each.name: each.values for each in compare_jobs([a, b]).outcomes if each.name != "steps done"}
    assert outcomes["training loss"] == (2.5, None)
    assert outcomes["measured peak"] == (100.0, None)
    assert "validation loss" not in outcomes


def test_jobs_come_in_the_order_asked_for_and_each_once(ada: User, make_run: Callable[..., Job]) -> None:
    a, b = make_run(), make_run()
    assert read_jobs(ada, [b.pk, a.pk, b.pk]) == [b, a]


@pytest.mark.parametrize("number", [0, 1, MAX_JOBS + 1])
def test_too_few_and_too_many_are_refused(ada: User, number: int) -> None:
    with pytest.raises(InvalidInput, match=f"{number} jobs are named; allowed: 2 to 10"):
        read_jobs(ada, [f"job_{index}" for index in range(number)])


@pytest.mark.parametrize("name", ["job_none", "a\0b", "é" * 40, "../x"])
def test_a_job_that_is_not_ones_own_is_not_there(ada: User, eve: User, make_run: Callable[..., Job], name: str) -> None:
    mine = make_run()
    with pytest.raises(InvalidInput, match="is not there"):
        read_jobs(ada, [mine.pk, name])
    with pytest.raises(InvalidInput, match="is not there"):
        read_jobs(eve, [mine.pk, make_run().pk])
