"""A probe beside other work says so: in the machine's record, in what is printed, and in the intervals."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from benchmarks.common.machines import make_cpu_machine
from optimizer.base.errors import InvalidInput
from optimizer.cli.reports.text import report_machine
from optimizer.estimate.time_interval import time_interval
from optimizer.hardware.calibration import Spread
from optimizer.hardware.machine import PROBE_DISTURBED_FACT, Machine
from optimizer.hardware.probe.disturbance import NOTABLE_SLOWDOWN, Disturbance, Watch


def seen(*, pace: float = 1.05, others_cores: float = 0.1, num_cores: int = 2, num_threads: int = 2) -> Disturbance:
    return Disturbance(pace=pace, others_cores=others_cores, num_cores=num_cores, num_threads=num_threads)


def test_a_machine_left_alone_is_not_spoken_of() -> None:
    assert seen().slowdown == 1.0
    assert seen().describe() == ""


def test_others_on_cores_that_the_probe_does_not_want_do_not_count() -> None:
    assert seen(others_cores=8.0, num_cores=16, num_threads=4).slowdown == 1.0


def test_cores_that_others_took_from_the_probe_slow_it_down_by_their_share() -> None:
    assert seen(others_cores=1.0).slowdown == 2.0
    assert seen(others_cores=2.0).slowdown == 10.0


def test_the_same_work_taking_longer_at_times_counts_by_itself() -> None:
    assert seen(pace=2.3).slowdown == 2.3
    assert seen(pace=2.3).describe() == (
        "the machine was busy: other programs kept 0.1 of 2 cores, and the same work took up to 2.3 times its least; times may "
        "be 2.3 times too long, which intervals allow for. Probe again when nothing else runs; finished jobs correct it, too"
    )


@pytest.fixture
def crowd() -> Iterator[None]:
    """Three busy processes for each core."""
    spin = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    others = [
        subprocess.Popen(spin, stdout=subprocess.PIPE) for _ in range(3 * len(os.sched_getaffinity(0)))
    ]
    for each in others:
        each.stdout.readline()
    yield
    for each in others:
        each.kill()
        each.communicate()


def test_a_crowded_machine_is_noticed(crowd: None) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    watch = Watch(torch.device("cpu"))
    for _ in range(10):
        watch.look()
    found = watch.judge()
    torch.set_num_threads(threads)
    assert found.others_cores > found.num_cores / 4
    assert found.slowdown >= NOTABLE_SLOWDOWN


def test_the_interval_is_wider_both_ways_until_runs_have_finished() -> None:
    rates = make_cpu_machine().rates
    assert time_interval(rates, None) == (0.85, 1.15)
    disturbed = replace(rates, probe_slowdown=2.0)
    assert time_interval(disturbed, None) == (0.425, 2.3)
    told = Spread(width=0.25, num_runs=9)
    assert time_interval(disturbed, told) == (0.75, 1.25)


def test_a_machines_record_keeps_it_and_its_report_says_what_to_do() -> None:
    machine = make_cpu_machine()
    remark = seen(others_cores=1.0).describe()
    busy = replace(machine, rates=replace(machine.rates, probe_slowdown=2.0), facts={PROBE_DISTURBED_FACT: remark})
    assert Machine.from_json(busy.to_json()) == busy
    assert "Note: the machine was busy: other programs kept 1.0 of 2 cores" in report_machine(busy)
    assert "Note" not in report_machine(machine)


def test_a_record_from_before_it_was_noticed_is_read_as_undisturbed() -> None:
    document = make_cpu_machine().to_json()
    del document["rates"]["probe_slowdown"]
    assert Machine.from_json(document).rates.probe_slowdown == 1.0


def test_a_slowdown_that_would_narrow_intervals_is_refused() -> None:
    document = make_cpu_machine().to_json()
    document["rates"]["probe_slowdown"] = 0.5
    with pytest.raises(InvalidInput, match=r"machine.rates.probe_slowdown is 0.5; allowed: 1 to 1e\+06"):
        Machine.from_json(document)
