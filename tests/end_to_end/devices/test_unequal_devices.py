"""A real job on a small and a large device that the CPU plays: planned for both, claimed, trained, killed and gone on with."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from optimizer.base.units import GIB, MIB
from optimizer.hardware.machine import Machine
from optimizer.hardware.mixed import play_devices
from tests.breadth import SEVERAL_DEVICES
from tests.end_to_end.devices.test_two_devices import LINK, NUM_STEPS, GangJobs
from tests.end_to_end.site.stack import running_stack
from tests.end_to_end.test_survival import CHECKPOINT_EVERY, WORKLOAD
from tests.webapp.conftest import MACHINE_DOCUMENT
from tests.worker.processes import is_alive, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.breadth(SEVERAL_DEVICES)]

SIZES = (16 * MIB, GIB)
PINS = {"layout": {"num_devices": 2}}
ASKED: dict[str, Any] = {
    "workload": {**WORKLOAD, "num_steps": NUM_STEPS, "sample_tokens": 0, "global_batch_size": 8},
    "goal": {"device_budget_bytes": GIB, "num_devices": 2, "pins": PINS},
}


@pytest.fixture(scope="module")
def jobs() -> Iterator[GangJobs]:
    machine = play_devices(Machine.from_json({**MACHINE_DOCUMENT, "peers": LINK}), SIZES)
    with running_stack(machine=machine.to_json(), HEADROOM_DEVICES="16MiB, 1GiB") as stack:
        yield GangJobs(stack)
        print(stack.logs())


def submit(jobs: GangJobs) -> tuple[str, dict[str, Any]]:
    """The job, and its plan once there is one."""
    job = jobs.stack.ask("submit_planned", model=jobs.model, dataset=jobs.dataset, **ASKED)
    return job, wait_for(lambda: (found := plan_of(jobs, job))["plan"] and found, what=f"a plan of {job}", timeout_s=90)


def plan_of(jobs: GangJobs, job: str) -> dict[str, Any]:
    found: dict[str, Any] = jobs.stack.ask("plan_of", job=job)
    return found


def test_unequal_devices_train_as_planned_and_a_killed_rank_changes_no_bit(jobs: GangJobs) -> None:
    profile = jobs.stack.ask("request_profile", model=jobs.model)
    assert jobs.wait_for_end(profile)["state"] == "succeeded", jobs.log(profile)
    job, found = submit(jobs)
    row = jobs.wait_for_end(job)
    assert row["state"] == "succeeded", f"{row}\n{jobs.log(job)}"
    names = ["CPU with 16.0 MiB", "CPU with 1.00 GiB"]
    ranks = found["prediction"]["ranks"]
    (attempt,) = jobs.attempts(job)
    assert attempt["devices"] == [names.index(rank["device"]) for rank in ranks]
    assert sorted(attempt["devices"]) == [0, 1]
    peaks = attempt["measured"]["rank_peak_bytes"]
    for peak, rank, (name, num_bytes, _) in zip(peaks, ranks, found["needs"], strict=True):
        assert (name, num_bytes) == (rank["device"], rank["peak_high_bytes"])
        assert peak <= num_bytes <= SIZES[names.index(name)]
        assert peak == pytest.approx(rank["peak_bytes"], rel=0.01), (peaks, ranks)

    again, _ = submit(jobs)
    leader = jobs.wait_until_trained(again, step=CHECKPOINT_EVERY)
    processes = jobs.ranks(again, leader)
    os.kill(processes[1], signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, [leader, *processes])), what="the end of all processes", timeout_s=10)
    end = jobs.wait_for_end(again)
    assert end["state"] == "succeeded", f"{end}\n{jobs.log(again)}"
    assert end["summary"]["weights_sha256"] == row["summary"]["weights_sha256"]
    first, second = jobs.attempts(again)
    assert (first["outcome"], second["outcome"]) == ("worker_lost", "succeeded")
    assert first["devices"] == second["devices"] == attempt["devices"]
    assert second["resumed_from_step"] >= CHECKPOINT_EVERY
