"""The wait policy of threads is set before torch reads it, and never against the environment."""

import os
import subprocess
import sys

import pytest

from optimizer.base.threads import WAIT_POLICY, sleep_while_waiting

ASK_OPENMP = """\
from optimizer.base.threads import sleep_while_waiting
sleep_while_waiting()
import torch
torch.ones(1 << 20).sum()
"""


@pytest.mark.parametrize(
    ("given", "policy", "spins"),
    [
        ({}, "PASSIVE", "1000"),
        ({"OMP_WAIT_POLICY": "active"}, "ACTIVE", "30000000000"),
        ({"GOMP_SPINCOUNT": "7"}, "PASSIVE", "7"),
    ],
)
def test_the_policy_is_set_before_torchs_openmp_reads_it(given: dict[str, str], policy: str, spins: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in WAIT_POLICY}
    ended = subprocess.run(
        [sys.executable, "-c", ASK_OPENMP],
        env={**environment, **given, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"OMP_WAIT_POLICY = '{policy}'" in ended.stderr
    assert f"GOMP_SPINCOUNT = '{spins}'" in ended.stderr


def test_settings_of_the_environment_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    sleep_while_waiting()
    assert os.environ["OMP_WAIT_POLICY"] == "active"
