"""Freed memory stays with the process, unless the environment says otherwise."""

import os
import subprocess
import sys

import pytest

from optimizer.base.heap import MALLOC_SETTINGS, give_freed_memory_back, keep_freed_memory

COUNT_FAULTS = """\
import resource
import torch
from optimizer.base.heap import keep_freed_memory

keep_freed_memory()


def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.empty(3_000_000).fill_(1.0) for _ in range(8)]
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


print([faults_of_a_step() for _ in range(6)][-1])
"""
NUM_PAGES = 8 * 12_000_000 // os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
@pytest.mark.parametrize(("given", "is_kept"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)])
def test_later_steps_touch_the_same_pages_again(given: dict[str, str], is_kept: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in MALLOC_SETTINGS}
    ended = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS], env={**environment, **given}, capture_output=True, text=True, check=True
    )
    num_faults = int(ended.stdout)
    assert num_faults < NUM_PAGES / 10 if is_kept else num_faults > NUM_PAGES / 2


def test_where_the_c_library_knows_no_settings_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimizer.base.heap.ctypes.CDLL", lambda name: object())
    keep_freed_memory()
    give_freed_memory_back()
