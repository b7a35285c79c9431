"""Several jobs on one machine: who may join, what is written about it, and what is not learnt from it."""

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User

from optimizer.base.units import GIB, MIB
from tests.webapp.attempts.attempts import reread
from tests.webapp.conftest import make_bench, make_spec
from webapp.attempts.claiming import claim_job
from webapp.attempts.memory import may_probe
from webapp.attempts.outcome import finish_attempt
from webapp.catalog.actions import heartbeat_machine
from webapp.catalog.models import Dataset, Machine, Model
from webapp.jobs.actions import create_job
from webapp.jobs.devices.room import DESKTOP_BYTES, read_room
from webapp.jobs.models import PROBED, Attempt, Job

HALF: dict[str, Any] = {"step_ms": 10.0, "busy_by_kind_ms": {"matmul": 4.0, "disk": 2.0}}
WHOLE: dict[str, Any] = {"step_ms": 10.0, "busy_by_kind_ms": {"matmul": 9.5}}
DEVICE_BYTES = 8 * GIB
Make = Callable[..., Job]


@pytest.fixture
def make(make_job: Make) -> Make:
    """A queued job with what a prediction says of its lanes."""

    def make(prediction: dict[str, Any] | None, *, need_bytes: int = GIB) -> Job:
        job = make_job()
        Job.objects.filter(pk=job.pk).update(prediction=prediction, need_device_bytes=need_bytes)
        return job

    return make


def claim(machine: Machine, **arguments: Any) -> Attempt | None:
    return claim_job(worker="w", machine=machine, must_gain=True, **arguments)


def last_event(job: Job) -> str:
    return job.events.filter(kind="claimed").latest("seq").message


def test_a_job_joins_one_that_leaves_half_of_the_device_idle(make: Make, machine: Machine) -> None:
    first, second = make(HALF), make(HALF)
    assert claim(machine) is not None
    joined = claim(machine)
    assert joined is not None
    assert joined.job_id == second.pk
    assert last_event(first) == ""
    assert last_event(second) == "beside 1 other job on the device; no slower than alone"
    assert list(Attempt.objects.values_list("is_shared", flat=True)) == [True, True]


def test_a_job_that_would_only_take_turns_waits_and_so_do_those_behind_it(make: Make, machine: Machine) -> None:
    make(WHOLE)
    make(WHOLE)
    make(HALF)
    assert claim(machine) is not None
    assert claim(machine) is None


@pytest.mark.parametrize("predictions", [(None, HALF), (HALF, None), (HALF, {})])
def test_where_a_prediction_does_not_say_jobs_stay_alone(
    make: Make, machine: Machine, predictions: tuple[dict[str, Any] | None, ...]
) -> None:
    for prediction in predictions:
        make(prediction)
    assert claim(machine) is not None
    assert claim(machine) is None


def test_as_many_as_were_asked_for_run_however_slow_and_the_event_says_how_slow(make: Make, machine: Machine) -> None:
    make(WHOLE)
    second = make(WHOLE)
    assert claim_job(worker="w", machine=machine) is not None
    assert claim_job(worker="w", machine=machine) is not None
    assert last_event(second) == "beside 1 other job on the device; about 1.9 times as long as alone"


def test_jobs_at_work_get_an_event_of_each_that_joins_them_with_what_it_costs(
    make: Make, machine: Machine, django_capture_on_commit_callbacks: Callable[..., Any]
) -> None:
    first, second, third = make(WHOLE), make(WHOLE), make(None)
    with django_capture_on_commit_callbacks(execute=True):
        for _ in range(3):
            assert claim_job(worker="w", machine=machine) is not None
    shared = first.events.filter(kind="shared").order_by("seq")
    assert list(shared.values_list("message", "actor", "from_state", "to_state")) == [
        (f"{second.pk} began beside it on the device; about 1.9 times as long as alone", "worker:w", "starting", "starting"),
        (f"{third.pk} began beside it on the device", "worker:w", "starting", "starting"),
    ]
    assert second.events.get(kind="shared").message == f"{third.pk} began beside it on the device"
    assert not third.events.filter(kind="shared").exists()


def test_a_job_alone_is_not_marked(make: Make, machine: Machine) -> None:
    job = make(HALF)
    attempt = claim(machine)
    assert attempt is not None
    assert not attempt.is_shared
    assert last_event(job) == ""


def test_what_other_programs_hold_on_a_card_is_not_free(make: Make, machine: Machine) -> None:
    make(HALF, need_bytes=5 * GIB)
    assert claim(machine, used_bytes=[DESKTOP_BYTES + 4 * GIB]) is None
    assert claim(machine, used_bytes=[DESKTOP_BYTES]) is not None


def test_what_running_jobs_hold_counts_once(make: Make, machine: Machine) -> None:
    make(HALF, need_bytes=3 * GIB)
    assert claim(machine) is not None
    for used_bytes, left_bytes in ((0, 5 * GIB), (DESKTOP_BYTES + 2 * GIB, 5 * GIB), (DESKTOP_BYTES + 6 * GIB, 2 * GIB)):
        heartbeat_machine(machine, used_bytes=[used_bytes])
        assert read_room(Machine.objects.get(pk=machine.pk)).free_bytes == left_bytes


def test_what_others_hold_is_not_free_while_the_first_job_still_loads(make: Make, machine: Machine) -> None:
    make(HALF, need_bytes=3 * GIB)
    make(HALF, need_bytes=3 * GIB)
    # another program holds 3 GiB; the first job was claimed and has taken nothing yet
    used_bytes = DESKTOP_BYTES + 3 * GIB
    assert claim(machine, used_bytes=[used_bytes]) is not None
    assert claim(machine, used_bytes=[used_bytes]) is None
    # it has ended; what is used now is the job's
    assert claim(machine, used_bytes=[DESKTOP_BYTES]) is not None


def test_jobs_that_would_not_fit_in_the_host_s_memory_together_do_not_run_together(make: Make, machine: Machine) -> None:
    for host_bytes in (5 * GIB, 4 * GIB):
        make({**HALF, "host_peak_bytes": host_bytes})
    assert claim(machine) is not None
    assert claim(machine) is None
    Job.objects.filter(state="queued").update(prediction={**HALF, "host_peak_bytes": 3 * GIB})
    assert claim(machine) is not None


@pytest.mark.parametrize(("frozen", "joins"), [(("nf4", "nf4"), True), (("nf4", "int8"), False)])
def test_what_jobs_of_one_base_share_on_the_host_is_counted_once(
    make: Make, machine: Machine, frozen: tuple[str, str], joins: bool
) -> None:
    for form in frozen:
        job = make({**HALF, "host_peak_bytes": 5 * GIB, "base_bytes": 4 * GIB})
        weights = {"dtype": "bf16", "frozen": form, "place": "host"}
        Job.objects.filter(pk=job.pk).update(plan={"weights": weights})
    assert claim(machine) is not None
    assert (claim(machine) is not None) is joins


def test_each_job_on_a_card_brings_a_context_of_its_own(ada: User, model: Model, dataset: Dataset) -> None:
    card = make_bench("card", kind="cuda")
    allocated = {"low": 0, "value": 4 * GIB - MIB, "high": 4 * GIB - MIB}
    process = {"low": 0, "value": 4 * GIB + 400 * MIB, "high": 4 * GIB + 500 * MIB}
    memory = {"allocated": allocated, "process": process}
    prediction = {**HALF, "device_peak_high_bytes": 4 * GIB - MIB, "memory": memory}
    spec = make_spec(model, dataset, goal={"device_budget_bytes": 4 * GIB})
    for _ in range(2):
        create_job(owner=ada, spec=spec, model=model, dataset=dataset, plan={}, prediction=prediction, machine=card, actor="ada")
    assert claim(card) is not None
    # by their tensors alone both would fit into the card's 8 GiB
    assert claim(card) is None


def test_nothing_is_learnt_from_a_run_beside_others(make: Make, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    make(HALF)
    make(HALF)
    attempts = [claim(machine), claim(machine)]
    before = Machine.objects.get(pk=machine.pk).calibration
    measured = {"device_peak_bytes": 900, "step_ms": 200.0, "host_peak_bytes": 0, "num_steps": 10}
    done = {"outcome": "succeeded", "reason": "done", "message": "", "error": None, "step": 10, "measured": measured}
    for attempt in attempts:
        assert attempt is not None
        assert finish_attempt(attempt, result=done, exit_code=0) == "succeeded"
    assert Machine.objects.get(pk=machine.pk).calibration == before


def test_a_run_beside_others_is_not_probed_and_one_that_was_joined_goes_on_with_its_plan(make: Make, machine: Machine) -> None:
    job = make(HALF)
    make(HALF)
    first, second = claim(machine), claim(machine)
    assert first is not None
    assert second is not None
    assert not may_probe(second)
    probed = {"outcome": "drained", "reason": PROBED, "message": "a step took 20 ms", "error": None, "step": 5}
    assert finish_attempt(first, result=probed, exit_code=75) == "drained"
    assert not reread(job).awaits_plan
    assert job.events.latest("seq").message == "its first steps shared the device; it goes on with its plan"
