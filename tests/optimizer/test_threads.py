"""How threads wait: said before torch reads it, and never against what the environment says."""

import os
import subprocess
import sys

import pytest

from optimizer.threads import sleep_while_waiting

ASK_OPENMP = """\
from optimizer.threads import sleep_while_waiting
sleep_while_waiting()
import torch
torch.ones(1 << 20).sum()
"""


@pytest.mark.parametrize(("given", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "active"}, "ACTIVE")])
def test_torchs_openmp_was_told_before_it_asked(given, policy):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    ended = subprocess.run(
        [sys.executable, "-c", ASK_OPENMP],
        env={**environment, **given, "OMP_DISPLAY_ENV": "true"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"OMP_WAIT_POLICY = '{policy}'" in ended.stderr


def test_what_the_environment_says_stands(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    sleep_while_waiting()
    assert os.environ["OMP_WAIT_POLICY"] == "active"
