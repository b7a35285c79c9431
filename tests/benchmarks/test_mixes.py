"""The benchmark of jobs that share a device: one mix in simulated time, claimed by the service, and its goals."""

from typing import Any

import pytest

from benchmarks.mixes.command import summarize
from benchmarks.mixes.database import add_jobs, add_machine, reserve_bytes
from benchmarks.mixes.simulation import Mix, is_over, least_makespan_s, simulate, tensor_needs
from benchmarks.mixes.subjects import CPU, Subject, machines
from optimizer.base.units import MIB
from optimizer.hardware.machine import Machine
from webapp.jobs.models import Job

DEVICE_BYTES = machines()[CPU].device.memory_bytes


def subject(name: str, *, compute: float, disk: float = 0.0, num_bytes: int, tensor_bytes: int | None = None) -> Subject:
    """tensor_bytes: of a steady step, where another stage takes more."""
    prediction = {
        "step_ms": 100.0,
        "busy_by_kind_ms": {"matmul": 100 * compute, "disk": 100 * disk},
        "device_peak_high_bytes": tensor_bytes or num_bytes,
        "stages": [{"stage": "load", "device_peak_bytes": num_bytes}],
    }
    return Subject(
        name=name,
        machine=CPU,
        budget_bytes=num_bytes,
        plan={},
        prediction=prediction,
        device_bytes=num_bytes,
        host_bytes=0,
    )


def mix_of(*subjects: Subject, times_s: tuple[float, ...]) -> Mix:
    return Mix(subjects=subjects, times_s=times_s, owners=("ada",) * len(subjects))


def run(mix: Mix, machine: Machine, *, by_tensors: bool = False) -> Any:
    row = add_machine(machine)
    made = add_jobs(row, mix.subjects, owners=mix.owners)
    if by_tensors:
        reserve_bytes(made, tensor_needs(mix))
    found = simulate(mix, made, row=row, machine=machine, must_gain=True)
    assert set(Job.objects.values_list("state", flat=True)) == {"succeeded"}
    return found


@pytest.mark.django_db
def test_jobs_of_different_lanes_end_together_and_jobs_of_one_lane_take_turns() -> None:
    machine = machines()[CPU]
    busy, waits = subject("busy", compute=1.0, num_bytes=MIB), subject("waits", compute=0.0, disk=1.0, num_bytes=MIB)
    different = mix_of(busy, waits, times_s=(100.0, 60.0))
    found = run(different, machine)
    assert (found.makespan_s, found.most_at_once) == (pytest.approx(100.0), 2)
    assert least_makespan_s(different, machine) == pytest.approx(100.0)
    Job.objects.all().delete()
    alike = run(mix_of(busy, busy, times_s=(100.0, 60.0)), machine)
    assert (alike.makespan_s, alike.most_at_once) == (pytest.approx(160.0), 1)
    # while the second waits the lane is busy all the time
    assert alike.lane_s == pytest.approx(alike.waited_s) == pytest.approx(100.0)


@pytest.mark.django_db
def test_a_job_beside_another_goes_on_at_the_pace_that_is_left() -> None:
    machine = machines()[CPU]
    half = subject("half", compute=0.6, num_bytes=MIB)
    # 1.2 of a lane: both take 1.2 times as long, until the first has ended
    found = run(mix_of(half, half, times_s=(100.0, 200.0)), machine)
    assert sorted(found.ended_s.values()) == [pytest.approx(120.0), pytest.approx(220.0)]


@pytest.mark.django_db
def test_by_tensors_alone_jobs_go_over_the_device_while_they_load_and_by_stages_they_do_not() -> None:
    machine = machines()[CPU]
    loads = [
        subject(name, compute=lane, disk=1 - lane, num_bytes=DEVICE_BYTES * 2 // 3, tensor_bytes=DEVICE_BYTES // 3)
        for name, lane in (("one", 1.0), ("other", 0.0))
    ]
    mix = mix_of(*loads, times_s=(100.0, 100.0))
    over = run(mix, machine, by_tensors=True)
    assert is_over(over, machine) == {"device": True, "host": False}
    Job.objects.all().delete()
    counted = run(mix, machine)
    assert is_over(counted, machine) == {"device": False, "host": False}
    assert counted.makespan_s == pytest.approx(200.0)


def test_each_goal_is_judged_by_its_rows() -> None:
    admitted = {
        "what": "admission", "num_mixes": 500, "num_over_device": 0, "num_over_host": 0, "num_over_by_tensors_alone": 3,
        "waited_s": 10.0, "lane_used": 0.95, "shorter": [0.4, 0.31, 0.0], "possible": [0.4, 0.32, 0.1],
    }  # fmt: skip
    pair = {"what": "pair", "is_admitted": True, "error": -0.1, "num_out_of_memory": 0, "makespan_against_one_at_a_time": 0.6}
    declined = {**pair, "is_admitted": False, "error": 0.9, "makespan_against_one_at_a_time": 1.0}
    assert all(entry["met"] for entry in summarize([admitted, pair, declined]).values())
    bad = {**admitted, "num_over_host": 1, "lane_used": 0.5, "shorter": [0.1], "possible": [0.5], "num_mixes": 10}
    goals = summarize([bad, {**pair, "error": 0.2, "num_out_of_memory": 1}])
    missed = {name for name, entry in goals.items() if not entry["met"]}
    assert missed == {
        "random mixes",
        "mixes out of memory by packing",
        "device used where work waits (busiest lane)",
        "makespan against one at a time, shorter by (median)",
        "gain reached, of the most that any schedule could (median)",
        "real pairs out of memory",
        "slowdown of admitted real pairs, error (median)",
    }
