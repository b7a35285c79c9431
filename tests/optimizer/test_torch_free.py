"""Planning needs no torch: the rooms that promise it are imported in a fresh process."""

import subprocess
import sys

import pytest

MODULES = [
    "optimizer.search.search",
    "optimizer.search.core",
    "optimizer.hardware.devices",
    "optimizer.hardware.rental",
    "optimizer.hardware.calibration",
    "optimizer.hardware.memory",
    "optimizer.plan.explain.training",
    "optimizer.plan.explain.diff",
    "optimizer.cli.main",
    "optimizer.cli.reports.text",
]


@pytest.mark.parametrize("module", MODULES)
def test_importing_it_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
