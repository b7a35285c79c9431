"""A training job that ran out of memory: back in the queue under another plan, a few times, then failed with the whole story."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from optimizer.base.errors import DiskFull, OutOfDeviceMemory
from optimizer.base.units import GIB, KIB, MIB
from optimizer.hardware.devices import table_machine
from optimizer.plan.plan import Plan
from tests.webapp.attempts.attempts import DONE, DRAINED, kinds, run
from tests.webapp.conftest import MACHINE_DOCUMENT, make_spec
from webapp.attempts.claiming import claim_job
from webapp.attempts.memory import MAX_REPLANS
from webapp.attempts.outcome import finish_attempt
from webapp.attempts.records import record_checkpoint
from webapp.catalog.actions import register_machine
from webapp.catalog.models import Dataset, Machine, Model, Profile
from webapp.jobs.models import Attempt, Job, Kind, Reason, State
from webapp.jobs.queue import read_queue
from webapp.planning.replanning import failures_of
from webapp.planning.submitting import submit_job
from webapp.planning.waiting import plan_waiting_jobs
from worker.run.brief import make_brief

pytestmark = pytest.mark.django_db

Submit = Callable[..., Job]


@pytest.fixture
def submit(ada: User, profiled_llama: Model, dataset: Dataset, machine: Machine) -> Submit:
    """A job in the budget of the plan that keeps everything, unless another is given."""

    def submit(*, budget_bytes: int = 0, plan: str = "chosen", override: bool = False, **goal: Any) -> Job:
        def make(num_bytes: int) -> Job:
            spec = make_spec(profiled_llama, dataset, plan=plan, goal={**goal, "device_budget_bytes": num_bytes})
            return submit_job(ada, spec=spec, actor="user:ada", override=override)

        if budget_bytes:
            return make(budget_bytes)
        plain = make(2**30)
        peak_bytes = plain.prediction["device_peak_high_bytes"]
        plain.delete()
        return make(peak_bytes)

    return submit


def run_out(attempt: Attempt, *, missing_bytes: int = 64 * KIB, **fields: Any) -> str:
    """The attempt ends at the predicted peak of a steady step for want of so many bytes."""
    budget_bytes, prediction = attempt.job.spec["goal"]["device_budget_bytes"], attempt.prediction
    error = OutOfDeviceMemory(
        requested_bytes=budget_bytes - prediction["device_peak_bytes"] + missing_bytes,
        in_use_bytes=prediction["device_peak_bytes"],
        budget_bytes=budget_bytes,
        bytes_by_category=prediction["device_bytes_by_category"],
        moment=f"in {prediction['peak_moment']}",
        category="activations",
    )
    error.fields |= {"stage": "steady_step", "cause": "step", **fields}
    result = {**DONE, "outcome": "failed", "reason": error.code, "message": error.message, "error": error.to_json()}
    return finish_attempt(attempt, result=result, exit_code=1)


def test_a_job_out_of_memory_waits_for_another_plan_and_says_so(ada: User, submit: Submit, machine: Machine) -> None:
    job = submit()
    assert run_out(run(machine)) == Reason.OUT_OF_DEVICE_MEMORY
    job.refresh_from_db()
    assert (job.state, job.awaits_plan, job.failed_attempts, job.error) == (State.QUEUED, True, 0, None)
    assert job.message.endswith(
        "(in a steady step: the blocks of a step took more than predicted); another plan is looked for, number 1 of at most 3"
    )
    assert claim_job(worker="w", machine=machine, kinds=(Kind.TRAIN,)) is None
    (row,) = read_queue(ada).waiting
    assert row.sentence == "Memory ran out in attempt 1; another plan is looked for, and the job goes on with it."


def test_the_next_plan_is_another_with_room_for_what_was_missed(submit: Submit, machine: Machine) -> None:
    job = submit()
    first, spec = job.plan, job.spec
    run_out(run(machine))
    assert plan_waiting_jobs() == [job.pk]
    job.refresh_from_db()
    assert job.plan != first
    assert job.spec == spec
    assert job.prediction["device_peak_bytes"] + 64 * KIB <= job.prediction["device_peak_high_bytes"]
    assert job.prediction["device_peak_high_bytes"] <= spec["goal"]["device_budget_bytes"]
    attempt = claim_job(worker="w", machine=machine)
    assert attempt is not None
    assert attempt.plan == job.plan
    assert kinds(job)[-4:] == ["started", "requeued", "replanned", "claimed"]
    assert " to " in job.events.get(kind="replanned").message


def test_never_the_same_plan_twice_and_at_last_the_whole_story(submit: Submit, machine: Machine) -> None:
    job = submit()
    tried = []
    for _ in range(MAX_REPLANS):
        attempt = run(machine)
        tried.append(attempt.plan)
        assert run_out(attempt) == Reason.OUT_OF_DEVICE_MEMORY
        assert plan_waiting_jobs() == [job.pk]
    last = run(machine)
    assert last.plan not in tried
    assert len({str(plan) for plan in tried}) == MAX_REPLANS
    assert run_out(last) == "failed"
    job.refresh_from_db()
    assert (job.state, job.reason) == (State.FAILED, Reason.OUT_OF_DEVICE_MEMORY)
    story = [f"attempt {each.number}: {each.error['message']}" for each in job.attempts.order_by("number")]
    assert job.message == "; ".join(story)
    assert list(job.attempts.values_list("outcome", flat=True)) == [Reason.OUT_OF_DEVICE_MEMORY] * 4


def test_where_no_other_plan_fits_the_job_ends_with_each_attempt_and_what_it_would_take(submit: Submit, machine: Machine) -> None:
    job = submit()
    run_out(run(machine), missing_bytes=2**30)
    assert plan_waiting_jobs() == [job.pk]
    job.refresh_from_db()
    assert (job.state, job.reason) == (State.FAILED, Reason.OUT_OF_DEVICE_MEMORY)
    assert job.message.startswith("Attempt 1: device memory ran out in ")
    assert "no other plan fits" in job.message


@pytest.mark.parametrize(
    ("submitted", "goes_on"),
    [
        ({}, True),
        ({"on_out_of_memory": "stop"}, False),
        ({"plan": "keep_all"}, False),
        ({"plan": "keep_all", "on_out_of_memory": "replan"}, True),
    ],
)
def test_a_plan_taken_by_name_is_respected_unless_the_goal_says_otherwise(
    submit: Submit, machine: Machine, submitted: dict[str, Any], goes_on: bool
) -> None:
    job = submit(**submitted)
    assert run_out(run(machine)) == (Reason.OUT_OF_DEVICE_MEMORY if goes_on else "failed")
    job.refresh_from_db()
    assert job.awaits_plan == goes_on


def test_a_job_with_a_checkpoint_keeps_the_form_of_its_weights_and_state(submit: Submit, machine: Machine) -> None:
    job = submit(allow_lossy=True)
    attempt = run(machine)
    record_checkpoint(attempt, step=3, folder="checkpoints/step-3", manifest_sha256="0", num_bytes=1)
    run_out(attempt)
    plan_waiting_jobs()
    before, after = Plan.from_json(attempt.plan), Plan.from_json(Job.objects.get(pk=job.pk).plan)
    assert after != before
    assert (after.weights.dtype, after.optimizer_state.bits) == (before.weights.dtype, before.optimizer_state.bits)


def test_the_page_and_the_api_show_the_line_of_attempts(ada: User, submit: Submit, machine: Machine, client: Client) -> None:
    job = submit()
    run_out(run(machine))
    plan_waiting_jobs()
    attempt = run(machine)
    client.force_login(ada)
    first, second = client.get(f"/api/v1/jobs/{job.pk}/attempts").json()["results"]
    assert (first["outcome"], first["cause"], first["stage"]) == ("out_of_device_memory", "step", "steady_step")
    assert first["peak_bytes"] == first["budget_bytes"] + 64 * KIB
    assert (second["plan"], second["outcome"], second["cause"]) == (attempt.plan, "", "")
    assert first["change"] == ""
    assert second["change"] == job.events.get(kind="replanned").message
    page = client.get(f"/jobs/{job.pk}/?tab=plan").content.decode()
    assert "In a steady step: the blocks of a step took more than predicted" in page
    assert second["change"] in page
    assert "Device memory ran out" in page


def test_the_next_job_of_the_same_work_begins_with_what_was_learnt(
    ada: User, submit: Submit, machine: Machine, profiled_llama: Model, dataset: Dataset
) -> None:
    job = submit()
    run_out(run(machine))
    plan_waiting_jobs()
    job.refresh_from_db()
    again = submit_job(ada, spec={**job.spec, "plan": "chosen"}, actor="user:ada")
    assert again.plan == job.plan
    other = {**job.spec["workload"], "sequence_length": 16}
    smaller = submit_job(ada, spec={**job.spec, "workload": other}, actor="user:ada")
    assert smaller.prediction["device_peak_high_bytes"] - smaller.prediction["device_peak_bytes"] < 64 * KIB


def test_another_process_is_no_lesson_for_the_machine(submit: Submit, machine: Machine) -> None:
    submit()
    run_out(run(machine), cause="another_process")
    plan_waiting_jobs()
    machine.refresh_from_db()
    assert "shortfalls" not in machine.calibration


def kill(attempt: Attempt) -> str:
    """The host's killer ends the attempt."""
    error = {"code": "out_of_host_memory", "message": "killed", "hint": "", "fields": {"tier": "host", "cause": "host_killed"}}
    result = {**DONE, "outcome": "failed", "reason": "out_of_host_memory", "message": "killed", "error": error}
    return finish_attempt(attempt, result=result, exit_code=-9)


def test_after_the_hosts_killer_the_next_plan_takes_less(submit: Submit, machine: Machine) -> None:
    job = submit()
    before = job.prediction
    tiers = ("device_peak_bytes", "host_peak_bytes")
    assert kill(run(machine)) == Reason.OUT_OF_HOST_MEMORY
    assert plan_waiting_jobs() == [job.pk]
    job.refresh_from_db()
    after = job.prediction
    # the processor is the device here: its memory is the host's
    assert sum(after[tier] for tier in tiers) < 0.95 * sum(before[tier] for tier in tiers)
    assert all(after[tier] <= before[tier] for tier in tiers)


def test_a_plan_with_nothing_on_the_host_is_tried_again_later_when_the_host_killed_it(
    ada: User, profiled_llama: Model, dataset: Dataset
) -> None:
    card = register_machine(name="bench", document=table_machine("RTX 3060 12GB").to_json())
    forbid = ["offload", "offload_gradients", "offload_optimizer", "stream_weights"]
    goal = {"device_budget_bytes": 8 * GIB, "forbid": forbid}
    job = submit_job(ada, spec=make_spec(profiled_llama, dataset, goal=goal), actor="user:ada")
    assert job.prediction["host_peak_bytes"] == 0
    assert kill(run(card)) == Reason.OUT_OF_HOST_MEMORY
    plan = job.plan
    job.refresh_from_db()
    assert (job.state, job.awaits_plan, job.failed_attempts) == (State.QUEUED, False, 1)
    assert job.plan == plan
    assert job.not_before is not None


def test_a_job_that_keeps_its_plan_is_tried_again_later_when_the_host_killed_it(submit: Submit, machine: Machine) -> None:
    job = submit(plan="keep_all")
    kill(run(machine))
    job.refresh_from_db()
    assert (job.state, job.awaits_plan, job.failed_attempts) == (State.QUEUED, False, 1)
    assert job.not_before is not None


@pytest.fixture
def with_disk(db: None) -> Machine:
    """A machine with room and rates for a scratch file."""
    rates = {"disk_write_bytes_per_s": 1e9, "disk_read_bytes_per_s": 1e9, "host_optimizer_elements_per_s": 1e8}
    document = {**MACHINE_DOCUMENT, "disk_free_bytes": GIB, "rates": {**MACHINE_DOCUMENT["rates"], **rates}}
    return register_machine(name="bench", document=document)


def fill_disk(attempt: Attempt, **fields: int) -> str:
    """The attempt ends because the disk had no room."""
    error = DiskFull("the disk is full", hint="", cause="disk", **fields)
    result = {**DONE, "outcome": "failed", "reason": error.code, "message": error.message, "error": error.to_json()}
    return finish_attempt(attempt, result=result, exit_code=1)


@pytest.fixture
def on_disk(ada: User, with_disk: Machine, profiled_llama: Model, dataset: Dataset) -> Submit:
    """A job whose plan keeps what blocks save in a scratch file; its goal pins that, or leaves it open."""

    def submit(*, is_pinned: bool) -> Job:
        pins = {"activations": {"per_block": ["offload_disk"]}}
        goal: dict[str, Any] = {"device_budget_bytes": GIB, "pins": pins}
        workload = {"sequence_length": 128, "global_batch_size": 8, "num_steps": 10}
        job = submit_job(ada, spec=make_spec(profiled_llama, dataset, goal=goal, workload=workload), actor="user:ada")
        if not is_pinned:
            job.spec["goal"] = {"device_budget_bytes": GIB}
            job.save(update_fields=["spec"])
        return job

    return submit


@pytest.mark.parametrize("is_checkpoint", [False, True])
def test_a_full_disk_leads_to_a_plan_that_keeps_less_on_it(
    ada: User, with_disk: Machine, on_disk: Submit, *, is_checkpoint: bool
) -> None:
    job = on_disk(is_pinned=False)
    before = job.prediction["disk_peak_bytes"]
    own_bytes = max(peak["file_bytes"] for peak in job.prediction["stages"])
    half_bytes = before // 2
    assert own_bytes < half_bytes
    # either way the disk has room for the job's own files and half of the scratch file
    fields = {"requested_bytes": half_bytes + own_bytes, "in_use_bytes": half_bytes, "free_bytes": own_bytes}
    if is_checkpoint:
        fields = {"needed_bytes": own_bytes, "free_bytes": own_bytes - half_bytes + KIB, "floor_bytes": KIB}
    assert fill_disk(run(with_disk), **fields) == Reason.DISK_FULL
    job.refresh_from_db()
    assert (job.state, job.awaits_plan, job.failed_attempts) == (State.QUEUED, True, 0)
    assert job.message == "the disk is full; a plan that keeps less on the disk is looked for"
    (row,) = read_queue(ada).waiting
    assert row.sentence == "The disk was full in attempt 1; a plan that keeps less on it is looked for."
    assert plan_waiting_jobs() == [job.pk]
    job.refresh_from_db()
    assert job.prediction["disk_peak_bytes"] <= half_bytes + own_bytes
    assert not job.awaits_plan
    # how full the disk was once says nothing of the next job
    with_disk.refresh_from_db()
    assert "shortfalls" not in with_disk.calibration


def test_where_no_plan_keeps_less_on_a_full_disk_the_job_waits_for_room_under_its_own(
    with_disk: Machine, on_disk: Submit
) -> None:
    job = on_disk(is_pinned=True)
    plan = job.plan
    for number in range(2):
        assert fill_disk(run(with_disk), requested_bytes=MIB, in_use_bytes=0, free_bytes=KIB) == Reason.DISK_FULL
        assert plan_waiting_jobs() == [job.pk]
        job.refresh_from_db()
        assert (job.state, job.plan, job.awaits_plan, job.failed_attempts) == (State.QUEUED, plan, False, 0)
        assert job.not_before is not None
        said = job.events.filter(kind="replanned").order_by("-pk")[0].message
        assert said == "no plan that keeps less on the disk fits; the job goes on under this one once there is room"
        assert job.events.filter(kind="replanned").count() == number + 1
        Job.objects.filter(pk=job.pk).update(not_before=None)


def test_a_disk_that_was_full_of_something_else_rules_no_plan_out(submit: Submit, machine: Machine) -> None:
    job = submit()
    full = {**DONE, "outcome": "failed", "reason": "disk_full", "message": "the disk is full", "error": None}
    finish_attempt(run(machine), result=full, exit_code=1)
    assert failures_of(job) == []


def test_a_plan_without_a_scratch_file_waits_for_room_on_a_full_disk(submit: Submit, machine: Machine) -> None:
    job = submit()
    assert fill_disk(run(machine), needed_bytes=GIB, free_bytes=KIB, floor_bytes=KIB) == Reason.DISK_FULL
    job.refresh_from_db()
    assert (job.state, job.awaits_plan) == (State.QUEUED, False)
    assert job.not_before is not None


def test_other_ends_leave_the_plan_as_it_is(submit: Submit, machine: Machine) -> None:
    job = submit()
    finish_attempt(run(machine), result=DRAINED, exit_code=75)
    job.refresh_from_db()
    assert not job.awaits_plan


def probe(attempt: Attempt, *, slower: float = 1.0, more_bytes: int = 0) -> str:
    """The attempt's first steps took so many times what was predicted."""
    predicted = attempt.prediction
    measured = {
        "device_peak_bytes": predicted["device_peak_high_bytes"] + more_bytes,
        "step_ms": predicted["step_ms"] * slower,
        "num_steps": 5,
    }
    result = {**DRAINED, "reason": "probed", "message": "a step took 9 s; predicted were 1 s to 2 s", "measured": measured}
    record_checkpoint(attempt, step=4, folder="checkpoints/step-4", manifest_sha256="0", num_bytes=1)
    return finish_attempt(attempt, result=result, exit_code=75)


def test_first_steps_outside_the_prediction_correct_it_and_the_job_is_planned_again_once(
    submit: Submit, machine: Machine, headroom_home: Path
) -> None:
    job = submit()
    attempt = run(machine)
    brief = {"folder": headroom_home / "attempt", "home": headroom_home, "devices": ["cpu"]}
    assert make_brief(attempt, **brief)["probe_enough_left_s"] == 600
    assert probe(attempt, slower=3.0) == "probed"
    job.refresh_from_db()
    assert (job.awaits_plan, job.failed_attempts, job.reason) == (True, 0, "")
    assert job.message == (
        "a step took 9 s; predicted were 1 s to 2 s; the plan is looked at again before the rest of the run"
    )
    assert plan_waiting_jobs() == [job.pk]
    job.refresh_from_db()
    assert job.prediction["step_ms"] > 1.5 * attempt.prediction["step_ms"]
    again = run(machine)
    assert "probe_enough_left_s" not in make_brief(again, **brief)
    assert again.job.events.get(kind="replanned").message


def test_first_steps_with_more_bytes_than_predicted_lead_to_a_plan_with_room_for_them(
    submit: Submit, machine: Machine
) -> None:
    job = submit()
    attempt = run(machine)
    probe(attempt, more_bytes=64 * KIB)
    plan_waiting_jobs()
    job.refresh_from_db()
    assert job.plan != attempt.plan
    assert job.prediction["device_peak_bytes"] + 64 * KIB <= job.spec["goal"]["device_budget_bytes"]


def test_where_no_other_plan_has_room_a_probed_job_goes_on_under_its_own(submit: Submit, machine: Machine) -> None:
    job = submit()
    attempt = run(machine)
    probe(attempt, more_bytes=2**30)
    assert plan_waiting_jobs() == [job.pk]
    job.refresh_from_db()
    assert (job.state, job.plan) == (State.QUEUED, attempt.plan)
    assert job.events.get(kind="replanned").message == "no other plan fits; the job goes on under this one"


def test_a_probed_job_goes_on_under_its_plan_where_no_search_is_possible(submit: Submit, machine: Machine) -> None:
    job = submit()
    attempt = run(machine)
    probe(attempt, slower=3.0)
    refused = {"code": "bad_model", "message": "the model cannot be traced"}
    Profile.objects.update(document=None, document_sha256="", error=refused)
    assert plan_waiting_jobs() == [job.pk]
    job.refresh_from_db()
    assert (job.state, job.plan) == (State.QUEUED, attempt.plan)
    assert job.events.get(kind="replanned").message == "no other plan could be looked for; the job goes on under this one"


def test_the_next_plan_runs_on_the_devices_of_the_one_before(
    ada: User, pair: Machine, profiled_llama: Model, dataset: Dataset
) -> None:
    # Where a model is cut may change with the next plan.
    pins = {"layout": {"num_devices": 2}}
    goal: dict[str, Any] = {"device_budget_bytes": 2**30, "num_devices": 2, "pins": pins, "forbid": ["cut_model"]}
    plain = submit_job(ada, spec=make_spec(profiled_llama, dataset, goal=goal), actor="user:ada")
    goal["device_budget_bytes"] = plain.prediction["device_peak_high_bytes"]
    plain.delete()
    job = submit_job(ada, spec=make_spec(profiled_llama, dataset, goal=goal), actor="user:ada")
    before = job.plan
    run_out(run(pair))
    assert plan_waiting_jobs() == [job.pk]
    job.refresh_from_db()
    assert job.plan != before
    assert job.plan["layout"] == before["layout"]
    assert (job.plan["layout"]["num_devices"], job.need_devices) == (2, 2)


def test_a_model_that_is_cut_goes_on_cut_under_plans_with_more_room_and_ends_in_words(
    ada: User, pair: Machine, profiled_llama: Model, dataset: Dataset
) -> None:
    pins = {"layout": {"num_devices": 2, "stage_blocks": [2, 2]}}
    goal: dict[str, Any] = {"device_budget_bytes": 2**30, "num_devices": 2, "pins": pins}
    plain = submit_job(ada, spec=make_spec(profiled_llama, dataset, goal=goal), actor="user:ada")
    goal["device_budget_bytes"] = plain.prediction["device_peak_high_bytes"]
    plain.delete()
    job = submit_job(ada, spec=make_spec(profiled_llama, dataset, goal=goal), actor="user:ada")
    tried: list[Any] = []
    while job.state == State.QUEUED and len(tried) <= MAX_REPLANS:
        attempt = run(pair)
        assert attempt.plan not in tried
        assert attempt.plan["layout"]["stage_blocks"] == [2, 2]
        tried.append(attempt.plan)
        run_out(attempt)
        plan_waiting_jobs()
        job.refresh_from_db()
    assert len(tried) > 1
    assert (job.state, job.reason) == (State.FAILED, Reason.OUT_OF_DEVICE_MEMORY)
