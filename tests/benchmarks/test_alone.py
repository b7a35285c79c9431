"""The commands for a rented card's machine import with torch, transformers, numpy and scipy alone."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMANDS = ("benchmarks.accuracy.command", "benchmarks.gpu_check", "benchmarks.training.command", "optimizer.cli")
SCRIPT = """
import importlib, re, sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()

def with_all_below(names):
    found, left = set(), list(names)
    while left:
        name = normal(left.pop())
        if name in found:
            continue
        try:
            needed = requires(name) or []
        except PackageNotFoundError:
            continue
        found.add(name)
        left += [re.match(r"[\\w.-]+", line)[0] for line in needed if "extra ==" not in line]
    return found

allowed = with_all_below(["torch", "transformers", "numpy", "scipy"])
others = {top for top, owners in packages_distributions().items() if not allowed & {normal(owner) for owner in owners}}
ours = {"benchmarks", "optimizer"}
missed = set()

class OnlyThese:
    find_distributions = PathFinder.find_distributions

    @staticmethod
    def find_spec(name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {"worker", "webapp", "tests"} or (top in others and top not in ours):
            missed.add(top)
            return None
        return PathFinder.find_spec(name, path, target)

assert {"django", "bitsandbytes", "peft"} <= others, sorted(others)
sys.meta_path = [OnlyThese if finder is PathFinder else finder for finder in sys.meta_path]
for command in sys.argv[1:]:
    importlib.import_module(command)
assert not missed & {"django", "celery", "worker", "webapp"}, missed
"""


def test_the_commands_for_a_card_import_where_nothing_else_is_installed() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, *COMMANDS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
