"""Specs for a machine with devices of several kinds: planned for all of them, and each rank claimed on its own kind."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User

from optimizer.base.errors import InvalidInput, OutOfDeviceMemory
from optimizer.base.units import GIB, MIB
from optimizer.hardware.machine import Machine as MachineSpec
from optimizer.hardware.mixed import play_devices
from tests.webapp.attempts.attempts import DONE, run
from tests.webapp.conftest import MACHINE_DOCUMENT, make_spec
from webapp.attempts.claiming import claim_job
from webapp.attempts.outcome import finish_attempt
from webapp.catalog.actions import register_machine
from webapp.catalog.documents import machine_documents
from webapp.catalog.models import Dataset, Machine, Model
from webapp.jobs.devices.named import NAMED, read_needs
from webapp.jobs.models import Reason
from webapp.jobs.specs.generation import read_job_spec
from webapp.jobs.specs.training import JobSpec
from webapp.pages.shown.machines.device_bar import devices_words
from webapp.planning.pricing import LargestFit, find_largest_fit, price_spec
from webapp.planning.search.resolve import Waiting, place_of, resolve
from webapp.planning.search.training import asked_by_training, problem_of
from webapp.planning.submitting import submit_job
from webapp.planning.waiting import plan_waiting_jobs

pytestmark = pytest.mark.django_db

WORKLOAD = {"sequence_length": 128, "global_batch_size": 8, "num_steps": 10}
SMALL, LARGE = "CPU with 64.0 MiB", "CPU with 1.00 GiB"
Spec = Callable[..., dict[str, Any]]


@pytest.fixture
def uneven() -> Machine:
    """A machine of which the CPU plays a small device and a large one."""
    machine = play_devices(MachineSpec.from_json(MACHINE_DOCUMENT), [64 * MIB, GIB])
    return register_machine(name="uneven", document=machine.to_json())


@pytest.fixture
def spec(profiled_llama: Model, dataset: Dataset) -> Spec:
    def make(**goal: Any) -> dict[str, Any]:
        asked = {"device_budget_bytes": GIB, **goal}
        return make_spec(profiled_llama, dataset, goal=asked, workload=WORKLOAD)

    return make


def on_both(spec: Spec, **goal: Any) -> dict[str, Any]:
    return spec(num_devices=2, **{"pins": {"layout": {"num_devices": 2}}, **goal})


def test_a_plan_for_all_devices_says_which_device_gets_which_share(ada: User, uneven: Machine, spec: Spec) -> None:
    offers = price_spec(ada, on_both(spec, forbid=["cut_model"])).offers
    chosen = next(offer for offer in offers if offer.is_chosen)
    ranks = chosen.row.prediction["ranks"]
    shown = chosen.to_json()
    devices = [rank["device"] for rank in shown["prediction"]["ranks"]]
    assert sorted(devices) == sorted([SMALL, LARGE])
    assert shown["machine"]["device"] == " and ".join(devices)
    assert sum(rank["num_sequences"] for rank in ranks) == 8
    assert all(rank["peak_high_bytes"] <= rank["memory_bytes"] for rank in ranks)
    assert [rank["memory_bytes"] for rank in ranks] == [{SMALL: 64 * MIB, LARGE: GIB}[rank["device"]] for rank in ranks]
    for rank, found in enumerate(ranks):
        assert any(line.startswith(f"rank {rank} on {found['device']} takes ") for line in chosen.explanation)


def test_a_model_that_is_cut_over_them_needs_each_stages_bytes_on_its_own_device(ada: User, uneven: Machine, spec: Spec) -> None:
    job = submit_job(ada, spec=on_both(spec, pins={"layout": {"stage_blocks": [1, 3]}}), actor="user:ada")
    ranks = job.prediction["ranks"]
    assert job.plan["layout"]["stage_blocks"] == [1, 3]
    assert [share["device"] for share in job.plan["layout"]["ranks"]] == [rank["device"] for rank in ranks]
    assert {rank["num_sequences"] for rank in ranks} == {8}
    needs = read_needs(job.need_ranks)
    assert [(need.device, need.num_bytes) for need in needs] == [(rank["device"], rank["peak_high_bytes"]) for rank in ranks]
    attempt = claim_job(worker="w", machine=uneven)
    assert attempt is not None
    assert attempt.devices == [{SMALL: 0, LARGE: 1}[need.device] for need in needs]


def test_its_job_needs_each_ranks_bytes_on_its_own_device_and_is_claimed_there(
    ada: User, uneven: Machine, spec: Spec
) -> None:
    job = submit_job(ada, spec=on_both(spec), actor="user:ada")
    needs = read_needs(job.need_ranks)
    assert (job.need_device_kind, job.need_devices) == (NAMED, 2)
    assert [need.device for need in needs] == [rank["device"] for rank in job.prediction["ranks"]]
    assert [need.num_bytes for need in needs] == [rank["peak_high_bytes"] for rank in job.prediction["ranks"]]
    attempt = claim_job(worker="w", machine=uneven)
    assert attempt is not None
    assert attempt.devices == [{SMALL: 0, LARGE: 1}[need.device] for need in needs]


def test_a_job_of_one_device_names_the_kind_that_it_is_planned_for(ada: User, uneven: Machine, spec: Spec) -> None:
    job = submit_job(ada, spec=spec(), actor="user:ada")
    (need,) = read_needs(job.need_ranks)
    (rank,) = job.prediction["ranks"]
    attempt = claim_job(worker="w", machine=uneven)
    assert attempt is not None
    assert (need.device, attempt.devices) == (rank["device"], [{SMALL: 0, LARGE: 1}[need.device]])


def test_single_decisions_are_refused_in_words(ada: User, uneven: Machine, spec: Spec) -> None:
    asked = read_job_spec(ada, spec())
    questions = resolve(asked_by_training(asked), [place_of(uneven)])
    assert not isinstance(questions, Waiting)
    (question,) = questions
    words = "single decisions cannot be tried on bench, which has devices of several kinds (CPU with 64.0 MiB, CPU with 1.00 GiB)"
    with pytest.raises(InvalidInput, match=re.escape(words)):
        problem_of(question)
    assert question.find_by_hand(taken=None) is None


def test_more_devices_than_all_kinds_together_have_are_refused(ada: User, uneven: Machine, spec: Spec) -> None:
    with pytest.raises(InvalidInput, match="goal.num_devices is 3; the machines here have at most 2 devices"):
        price_spec(ada, spec(num_devices=3))


def test_lists_name_every_kind_of_device(uneven: Machine) -> None:
    (document,) = machine_documents([uneven])
    assert [kind["device"]["name"] for kind in document["others"]] == [LARGE]
    assert devices_words(document).startswith(f"2 devices with 1x {SMALL}, 1x {LARGE}")


def test_a_job_out_of_memory_goes_on_under_a_plan_that_leaves_that_device_more(
    ada: User, uneven: Machine, spec: Spec
) -> None:
    job = submit_job(ada, spec=on_both(spec), actor="user:ada")
    first = job.prediction["ranks"]
    attempt = run(uneven)
    rank = [each["device"] for each in first].index(SMALL)
    error = OutOfDeviceMemory(
        requested_bytes=first[rank]["memory_bytes"] - first[rank]["peak_bytes"] + MIB,
        in_use_bytes=first[rank]["peak_bytes"],
        budget_bytes=first[rank]["memory_bytes"],
        bytes_by_category=attempt.prediction["device_bytes_by_category"],
        moment="in backward of block 4",
        category="activations",
    )
    error.fields |= {"stage": "steady_step", "cause": "step", "rank": rank, "num_ranks": 2}
    result = {**DONE, "outcome": "failed", "reason": error.code, "message": error.message, "error": error.to_json()}
    assert finish_attempt(attempt, result=result, exit_code=1) == Reason.OUT_OF_DEVICE_MEMORY
    assert plan_waiting_jobs() == [job.pk]
    before = job.plan
    job.refresh_from_db()
    assert job.plan != before
    peaks = {each["device"]: each["peak_high_bytes"] for each in job.prediction["ranks"]}
    assert peaks.get(SMALL, 0) < first[rank]["peak_high_bytes"]
    assert [need.num_bytes for need in read_needs(job.need_ranks)] == list(peaks.values())
    again = claim_job(worker="w", machine=uneven)
    assert again is not None
    assert again.devices == [{SMALL: 0, LARGE: 1}[name] for name in peaks]
    uneven.refresh_from_db()
    (learnt,) = uneven.calibration["shortfalls"].values()
    assert [(each["stage"], each["tier"], each["device"]) for each in learnt] == [("steady_step", "device", SMALL)]
    # the next job of this work begins with what was learnt
    job.refresh_from_db()
    after = submit_job(ada, spec=on_both(spec), actor="user:ada")
    assert after.plan != before
    short_bytes = learnt[0]["num_bytes"]
    kept = {each["device"]: each for each in after.prediction["ranks"]}
    assert SMALL not in kept or kept[SMALL]["peak_high_bytes"] + short_bytes <= kept[SMALL]["memory_bytes"]


def test_the_largest_batch_is_that_of_the_other_machines_and_refused_where_there_is_none(
    ada: User, uneven: Machine, machine: Machine, spec: Spec
) -> None:
    asked = read_job_spec(ada, spec(objective="largest_batch"))
    assert isinstance(asked, JobSpec)
    found = find_largest_fit(ada, asked)
    assert isinstance(found, LargestFit)
    assert found.machine == machine
    machine.delete()
    with pytest.raises(InvalidInput, match="is asked of devices of several kinds"):
        find_largest_fit(ada, asked)
