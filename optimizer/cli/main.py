"""Planning from the command line, without any service: ``python -m optimizer.cli plan|estimate|profile|probe``.

``plan`` searches (``plan.py``), ``estimate`` prices one plan and explains it (``estimate.py``), ``profile`` writes a
model's profile to a file, ``probe`` measures this machine. The same commands appear in ``headroom`` through
``add_subcommands``. An error is one line and a hint on standard error, exit code 2. This process imports torch only to write a
profile or to measure this machine: what ``plan`` and ``estimate`` need of a model is kept, or traced by a child
(``profile/keep/obtain.py``).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from optimizer.api.inputs import read_model
from optimizer.base.errors import HeadroomError
from optimizer.base.threads import sleep_while_waiting
from optimizer.cli.estimate import add_estimate_command
from optimizer.cli.options import write_json
from optimizer.cli.plan import add_plan_command
from optimizer.cli.reports.text import report_machine, report_profile


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 where the request cannot be met or understood."""
    parser = argparse.ArgumentParser(
        prog="python -m optimizer.cli", description="Plan training within a memory budget."
    )
    add_subcommands(parser.add_subparsers(dest="command", required=True, metavar="COMMAND"))
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except HeadroomError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return 2


def add_subcommands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the four commands. Each sets ``run``, a function of the parsed options that returns the exit code."""
    add_plan_command(commands)
    add_estimate_command(commands)

    profile = commands.add_parser("profile", help="write a model's profile, with which planning needs no torch")
    profile.add_argument(
        "--model", required=True, metavar="CONFIG_OR_PRESET", help="config.json, its folder, or a preset"
    )
    profile.add_argument("-o", "--output", required=True, metavar="FILE", type=Path, help="to write it to")
    profile.set_defaults(run=run_profile)

    probe = commands.add_parser("probe", help="measure this machine")
    probe.add_argument("--device", help="cpu, cuda or cuda:1; CUDA where there is one unless given")
    probe.add_argument("--name", help="of the machine; its host name unless given")
    probe.add_argument("--json", metavar="FILE", type=Path, help="also write the machine there, for --machine")
    probe.set_defaults(run=run_probe)


def run_profile(options: argparse.Namespace) -> int:
    from optimizer.profile.trace.trace import profile_model

    profile = profile_model(read_model(options.model))
    write_json(options.output, profile.to_json())
    print(report_profile(profile))
    print(f"written to {options.output}")
    return 0


def run_probe(options: argparse.Namespace) -> int:
    sleep_while_waiting()
    from optimizer.hardware.probe.probe import probe_machine

    machine = probe_machine(name=options.name, device=options.device)
    if options.json:
        write_json(options.json, machine.to_json())
    print(report_machine(machine))
    if options.json:
        print(f"written to {options.json}")
    return 0
