"""A generate job that ran out of memory: back in the queue under another plan, its finished prompts kept."""

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User

from optimizer.base.errors import DiskFull, OutOfDeviceMemory
from optimizer.base.units import GIB, KIB, MIB
from optimizer.plan.explain.diff import describe_generation_change
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.weights import WeightsPlan
from tests.webapp.attempts.attempts import DONE, kinds, run
from tests.webapp.conftest import MACHINE_DOCUMENT
from tests.webapp.generation import make_generate_spec, make_prompts
from webapp.attempts.memory import MAX_REPLANS, may_probe
from webapp.attempts.outcome import finish_attempt
from webapp.catalog.actions import register_machine
from webapp.catalog.models import Machine, Model
from webapp.jobs.models import Attempt, Job, Reason, State
from webapp.planning.submitting import submit_job
from webapp.planning.waiting import plan_waiting_jobs

pytestmark = pytest.mark.django_db

Submit = Callable[..., Job]


@pytest.fixture
def submit(ada: User, writer: Model, machine: Machine) -> Submit:
    """A job of eight prompts in a budget that its plan all but fills."""
    prompts = make_prompts(*({"prompt": f"In the beginning, verse {number}"} for number in range(8)), owner=ada)

    def submit(*, budget_bytes: int = 3 * MIB, plan: str = "chosen", **goal: Any) -> Job:
        goal = {"device_budget_bytes": budget_bytes, **goal}
        return submit_job(ada, spec=make_generate_spec(writer, prompts, plan=plan, goal=goal), actor="user:ada")

    return submit


def run_out(attempt: Attempt, *, missing_bytes: int = 64 * KIB, **fields: Any) -> str:
    """The attempt ends at its predicted peak for want of so many bytes."""
    budget_bytes, prediction = attempt.job.spec["goal"]["device_budget_bytes"], attempt.prediction
    error = OutOfDeviceMemory(
        requested_bytes=budget_bytes - prediction["device_peak_bytes"] + missing_bytes,
        in_use_bytes=prediction["device_peak_bytes"],
        budget_bytes=budget_bytes,
        bytes_by_category=prediction["device_bytes_by_category"],
        moment="in the prefill",
        category="kv_cache",
    )
    error.fields |= fields
    result = {**DONE, "outcome": "failed", "reason": error.code, "message": error.message, "error": error.to_json()}
    return finish_attempt(attempt, result=result, exit_code=1)


def test_it_goes_on_under_a_plan_with_room_for_what_was_missed(submit: Submit, machine: Machine) -> None:
    job = submit()
    first, before, spec = job.plan, job.prediction, job.spec
    assert run_out(run(machine), cause="prefill") == Reason.OUT_OF_DEVICE_MEMORY
    job.refresh_from_db()
    assert (job.state, job.awaits_plan, job.failed_attempts) == (State.QUEUED, True, 0)
    assert "(reading the prompts took more than predicted); another plan is looked for" in job.message
    assert plan_waiting_jobs() == [job.pk]
    job.refresh_from_db()
    assert not job.awaits_plan
    assert job.plan != first
    assert job.spec == spec
    assert job.prediction["device_peak_bytes"] + 64 * KIB <= before["device_peak_bytes"]
    assert "replanned" in kinds(job)


def test_never_the_same_plan_twice_and_at_last_the_job_ends(submit: Submit, machine: Machine) -> None:
    job = submit(budget_bytes=8 * MIB)
    plans = []
    for _ in range(MAX_REPLANS):
        plans.append(job.plan)
        run_out(run(machine))
        plan_waiting_jobs()
        job.refresh_from_db()
        if job.state != State.QUEUED:
            break
        assert job.plan not in plans
    else:
        assert run_out(run(machine)) == "failed"
        job.refresh_from_db()
    assert (job.state, job.reason) == (State.FAILED, Reason.OUT_OF_DEVICE_MEMORY)


def test_where_nothing_else_fits_the_job_ends_with_its_attempts_and_what_it_would_take(submit: Submit, machine: Machine) -> None:
    job = submit()
    run_out(run(machine), missing_bytes=20 * MIB)
    plan_waiting_jobs()
    job.refresh_from_db()
    assert (job.state, job.reason) == (State.FAILED, Reason.OUT_OF_DEVICE_MEMORY)
    assert job.message.startswith("Attempt 1: ")
    assert "no other plan fits 3.00 MiB with what that showed; the smallest needs" in job.message


def test_a_plan_that_was_taken_by_name_is_respected(submit: Submit, machine: Machine) -> None:
    submit(budget_bytes=100 * MIB, plan="resident")
    assert run_out(run(machine)) == "failed"


def kill(attempt: Attempt) -> str:
    """The host's killer ends the attempt."""
    error = {"code": "out_of_host_memory", "message": "the host ended it", "fields": {"cause": "host_killed"}}
    result = {**DONE, "outcome": "failed", "reason": "out_of_host_memory", "message": "the host ended it", "error": error}
    return finish_attempt(attempt, result=result, exit_code=137)


@pytest.mark.parametrize(("place", "budget_bytes"), [("device", 3 * MIB), ("host", 3 * MIB), ("host", 1100 * KIB)])
def test_a_job_that_the_host_killed_takes_less_of_it(submit: Submit, machine: Machine, place: str, budget_bytes: int) -> None:
    pins = {"weights": {"place": place}} if budget_bytes == 3 * MIB else {}
    job = submit(budget_bytes=budget_bytes, pins=pins)
    before, tiers = job.prediction, ("device_peak_bytes", "host_peak_bytes")
    assert bool(before["host_peak_bytes"]) == (place == "host")
    assert kill(run(machine)) == Reason.OUT_OF_HOST_MEMORY
    plan_waiting_jobs()
    job.refresh_from_db()
    assert (job.state, job.awaits_plan) == (State.QUEUED, False)
    # the processor is the device here: its memory is the host's
    assert sum(job.prediction[tier] for tier in tiers) < 0.99 * sum(before[tier] for tier in tiers)


def test_copies_of_the_model_share_what_the_host_has_left(ada: User, writer: Model, pair: Machine) -> None:
    prompts = make_prompts(*({"prompt": f"In the beginning, verse {number}"} for number in range(8)), owner=ada)
    goal = {"device_budget_bytes": 3 * MIB, "num_devices": 2, "pins": {"weights": {"place": "host"}}, "forbid": ["cut_model"]}
    job = submit_job(ada, spec=make_generate_spec(writer, prompts, goal=goal), actor="user:ada")
    assert job.prediction["num_replicas"] == 2
    kill(run(pair))
    plan_waiting_jobs()
    job.refresh_from_db()
    assert (job.state, job.prediction["num_replicas"]) == (State.QUEUED, 2)


def test_a_generate_job_s_first_steps_are_not_probed(submit: Submit, machine: Machine) -> None:
    submit()
    assert not may_probe(run(machine))


def test_the_change_of_plan_in_words() -> None:
    plan = GenerationPlan(batch_size=4)
    assert describe_generation_change(plan, plan) == ""
    other = GenerationPlan(batch_size=2, weights=WeightsPlan(place="host"), kv_cache=KvCachePlan(prefetch=2), prefill_tokens=4)
    assert describe_generation_change(plan, other) == (
        "2 sequences at once, not 4; prompts 4 tokens at a time; weights: device to host; keys and values: held otherwise"
    )


def test_a_full_disk_leads_to_a_plan_that_keeps_less_on_it(ada: User, writer: Model) -> None:
    rates = {"disk_write_bytes_per_s": 1e9, "disk_read_bytes_per_s": 1e9}
    document = {**MACHINE_DOCUMENT, "disk_free_bytes": GIB, "rates": {**MACHINE_DOCUMENT["rates"], **rates}}
    machine = register_machine(name="bench", document=document)
    goal = {"device_budget_bytes": 64 * MIB, "pins": {"weights": {"place": "disk"}}}
    prompts = make_prompts({"prompt": "In the beginning"}, owner=ada)
    job = submit_job(ada, spec=make_generate_spec(writer, prompts, goal=goal), actor="user:ada")
    job.spec["goal"] = {"device_budget_bytes": 64 * MIB}
    job.save(update_fields=["spec"])
    assert job.prediction["disk_peak_bytes"] > 64 * KIB
    error = DiskFull("the disk is full", hint="", cause="disk", requested_bytes=MIB, in_use_bytes=4 * KIB, free_bytes=4 * KIB)
    result = {**DONE, "outcome": "failed", "reason": error.code, "message": error.message, "error": error.to_json()}
    assert finish_attempt(run(machine), result=result, exit_code=1) == Reason.DISK_FULL
    assert plan_waiting_jobs() == [job.pk]
    job.refresh_from_db()
    assert job.state == State.QUEUED
    assert job.prediction["disk_peak_bytes"] <= 8 * KIB
