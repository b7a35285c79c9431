"""Checks one CUDA machine from end to end, the most valuable things first: one command for the day a card is at hand.

    python -m benchmarks.gpu_check [--json FILE] [--only PART] [--again PART] [--minutes M] [--quick] [--device cpu|hostile]

Parts, in order; each is a process of its own, since an error on a card can spoil all that follows in its process:

tests        the tests marked gpu
bits         every technique, pair and generation plan against keeping everything
budgets      plans chosen under the budgets of cards of 8 to 24 GB, carried out under the cap; plain training refused
fine-tunes   adapters on an 8B shape under 8 GB, full fine-tunes of 3B under 12 and of 8B under 24, beside other tools
memory       predicted allocated, reserved and process memory against what torch and the driver count
generations  generation under the same budgets, and accelerate's offload beside it

A part ends in under 8 minutes. ``--json`` keeps what every part found, and a later call with the same file goes on with the
parts that have not ended. ``--minutes`` ends the part that runs when they are over; its rows stay, and the next begins with it.
Needs torch, transformers, numpy, scipy, pytest, and accelerate and peft for their rows; what needs bitsandbytes or greenlet is
left out without them. ``--device cpu`` runs all parts on small shapes, and ``hostile`` does so on a device whose copies come as
late as CUDA allows. There plans that offload take more than is predicted for a CPU device, whose copies end at once, so budgets
and memory miss their goals for them.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.record import describe_machine

PART_LIMIT_S = 480.0
"""After this a part is ended; what it had written until then stays."""
_STARTING_S = 20.0
"""Time that a process and its libraries take, beside its part."""
_LEAST_S = 60.0
"""A part that has less is not begun, for it would have no rows to show."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A module that takes --json, --device and --quick, and whose exit code is 1 where it misses a goal."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()


PARTS = (
    Part(name="tests", module="benchmarks.gpu_check.card_tests"),
    Part(name="bits", module="benchmarks.gpu_check.bits"),
    Part(name="budgets", module="benchmarks.gpu_check.budgets"),
    Part(name="fine-tunes", module="benchmarks.training", arguments=("--cards",)),
    Part(name="memory", module="benchmarks.accuracy", arguments=("--cards",)),
    Part(name="generations", module="benchmarks.gpu_check.generations"),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    file: Path | None
    device: str
    """``hostile`` beside torch's names."""
    quick: bool
    only: tuple[str, ...]
    again: tuple[str, ...]
    minutes: float


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_options(arguments)
    result = read_result(options.file)
    result["machine"] = describe_machine(torch.device("cpu" if options.device == "hostile" else options.device))
    started_s = time.monotonic()
    for part in PARTS:
        if (options.only and part.name not in options.only) or (is_done(result, part) and part.name not in options.again):
            continue
        left_s = options.minutes * 60 - (time.monotonic() - started_s) - _STARTING_S
        if left_s < _LEAST_S:
            print(f"{part.name}: not begun, since time is over; the same command goes on with it", flush=True)
            continue
        print(f"== {part.name}", flush=True)
        result["parts"][part.name] = run_part(part, options, limit_s=min(PART_LIMIT_S, left_s))
        if options.file is not None:
            options.file.write_text(json.dumps(result, indent=1) + "\n")
    return print_summary(result)


def read_options(arguments: Sequence[str] | None) -> Options:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases of every part")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the result there, and go on from it")
    parser.add_argument("--only", choices=names, action="append", help="these parts alone; may be repeated")
    parser.add_argument("--again", choices=names, action="append", help="these parts even if they have ended; may be repeated")
    parser.add_argument("--minutes", type=float, default=60.0, help="end what still runs then")
    read = parser.parse_args(arguments)
    return Options(
        file=read.json,
        device=read.device,
        quick=read.quick,
        only=tuple(read.only or ()),
        again=tuple(read.again or ()),
        minutes=read.minutes,
    )


def read_result(file: Path | None) -> dict[str, Any]:
    """The file of an earlier call, or an empty result."""
    if file is not None and file.exists():
        earlier: dict[str, Any] = json.loads(file.read_text())
        return earlier
    return {"machine": {}, "parts": {}}


def is_done(result: dict[str, Any], part: Part) -> bool:
    """Report whether the part came to its end, its goals met or not."""
    found = result["parts"].get(part.name, {})
    return found.get("exit_code") == 0 or has_missed_goals(found)


def has_missed_goals(found: dict[str, Any]) -> bool:
    """Report whether a part came to its end and missed goals. Python also ends with 1 after an error, without a summary."""
    return found.get("exit_code") == 1 and bool(found.get("summary"))


def run_part(part: Part, options: Options, *, limit_s: float) -> dict[str, Any]:
    """The part's own result with its exit code (-1 where it was ended at the limit) and the seconds it took."""
    with tempfile.TemporaryDirectory(prefix="headroom-") as folder:
        file = Path(folder) / "part.json"
        started_s = time.monotonic()
        exit_code = run_limited(command_of(part, options, file), limit_s=limit_s)
        found = json.loads(file.read_text()) if file.exists() else {}
        return {"exit_code": exit_code, "seconds": round(time.monotonic() - started_s, 1), **found}


def run_limited(command: Sequence[str], *, limit_s: float) -> int:
    """The command's exit code; -1 where the limit has ended it, with the processes that it started."""
    with subprocess.Popen(command, process_group=0) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return -1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def command_of(part: Part, options: Options, file: Path) -> list[str]:
    is_hostile = options.device == "hostile"
    runner = ["benchmarks.gpu_check.on_hostile_device", part.module] if is_hostile else [part.module]
    device = "cpu" if is_hostile else options.device
    quick = ("--quick",) if options.quick else ()
    return [sys.executable, "-m", *runner, "--json", str(file), "--device", device, *part.arguments, *quick]


def print_summary(result: dict[str, Any]) -> int:
    """Print each part's goals; 1 where a part misses one, failed or is missing."""
    is_good = True
    for part in PARTS:
        found = result["parts"].get(part.name)
        if found is None:
            print(f"{part.name}: not run")
            is_good = False
            continue
        is_good = is_good and found["exit_code"] == 0
        code = found["exit_code"]
        endings = {0: "all goals met", -1: "ended at its time limit"}
        ending = "goals missed" if has_missed_goals(found) else endings.get(code, f"failed with exit code {code}")
        print(f"{part.name}: {ending}, {found['seconds']} s")
        for name, entry in found.get("summary", {}).items():
            print(f"  {name}: {entry['value']} (goal {entry['goal']}, {'met' if entry['met'] else 'MISSED'})")
    return 0 if is_good else 1
