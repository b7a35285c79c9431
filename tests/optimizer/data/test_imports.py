"""The modules that the web process and the planner import stay free of torch and transformers."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "optimizer.models.spec",
        "optimizer.models.presets",
        "optimizer.models.files.check_weights",
        "optimizer.data.inspect",
        "optimizer.data.tokens",
        "optimizer.data.batches",
    ],
)
def test_importing_brings_neither_torch_nor_transformers(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
