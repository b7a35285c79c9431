"""Planning from the command line, without any service: ``python -m optimizer.cli plan|estimate|profile|probe``.

``plan`` searches, ``estimate`` prices one plan, ``profile`` writes a model's profile to a file, ``probe`` measures
this machine. The same commands appear in ``headroom`` through ``add_subcommands``. An error is one line and a hint on
standard error, exit code 2. torch is imported only to profile a model or to measure this machine: a profile file and
``--gpu`` or ``--machine`` need none.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from optimizer.errors import HeadroomError, InvalidInput
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Machine
from optimizer.models.presets import PRESETS
from optimizer.models.spec import read_model_spec
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.reports import report_estimate, report_machine, report_profile, report_search
from optimizer.search.baselines import BASELINES
from optimizer.search.core import search
from optimizer.search.problem import SearchProblem
from optimizer.search.search import training_problem
from optimizer.techniques import TECHNIQUE_LABELS
from optimizer.units import parse_bytes
from optimizer.workload import Goal, OptimizerName, TrainingWorkload


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
    plan = commands.add_parser("plan", help="find the fastest plan that fits a memory budget")
    _add_model_options(plan)
    _add_workload_options(plan)
    _add_machine_options(plan)
    plan.add_argument("--allow-lossy", action="store_true", help="also choices that change the numbers, such as bf16")
    plan.add_argument(
        "--forbid",
        action="append",
        default=[],
        choices=list(TECHNIQUE_LABELS),
        metavar="TECHNIQUE",
        help=f"a technique not to use, several times for several: {', '.join(TECHNIQUE_LABELS)}",
    )
    plan.add_argument("--json", action="store_true", help="print the result as JSON")
    plan.set_defaults(run=run_plan)

    estimate = commands.add_parser("estimate", help="price one plan in bytes and milliseconds")
    _add_model_options(estimate)
    _add_workload_options(estimate)
    _add_machine_options(estimate)
    estimate.add_argument("--plan", required=True, help=f"{', '.join(BASELINES)}, or a file with a plan's JSON")
    estimate.add_argument("--json", action="store_true", help="print plan and prediction as JSON")
    estimate.set_defaults(run=run_estimate)

    profile = commands.add_parser("profile", help="write a model's profile, with which planning needs no torch")
    profile.add_argument(
        "--model", required=True, metavar="CONFIG_OR_PRESET", help="config.json, its folder, or a preset"
    )
    profile.add_argument("-o", "--output", required=True, metavar="FILE", type=Path)
    profile.set_defaults(run=run_profile)

    probe = commands.add_parser("probe", help="measure this machine")
    probe.add_argument("--device", help="cpu, cuda or cuda:1; CUDA where there is one unless given")
    probe.add_argument("--name", help="of the machine; its host name unless given")
    probe.add_argument("--json", metavar="FILE", type=Path, help="also write the machine there, for --machine")
    probe.set_defaults(run=run_probe)


def run_plan(options: argparse.Namespace) -> int:
    problem, machine, profile = _read_problem(options)
    result = search(problem)
    if options.json:
        _print_json({"machine": machine.to_json(), **result.to_json()})
    else:
        print(report_search(result, problem=problem, machine=machine, profile=profile))
    return 0


def run_estimate(options: argparse.Namespace) -> int:
    problem, machine, profile = _read_problem(options)
    plan = _read_plan(options.plan, problem)
    plan.check(
        num_blocks=problem.num_blocks, workload=problem.workload, has_sparse_gradients=problem.has_sparse_gradients
    )
    priced = problem.priced(options.plan, plan, problem.price(plan))
    if options.json:
        _print_json({"machine": machine.to_json(), **priced.to_json()})
    else:
        print(report_estimate(priced, problem=problem, machine=machine, profile=profile))
    return 0


def run_profile(options: argparse.Namespace) -> int:
    profile = _profile_model(options.model)
    _write_json(options.output, profile.to_json())
    print(report_profile(profile))
    print(f"written to {options.output}")
    return 0


def run_probe(options: argparse.Namespace) -> int:
    from optimizer.hardware.probe import probe_machine

    machine = probe_machine(name=options.name, device=options.device)
    if options.json:
        _write_json(options.json, machine.to_json())
    print(report_machine(machine))
    if options.json:
        print(f"written to {options.json}")
    return 0


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", metavar="CONFIG_OR_PRESET", help="config.json, its folder, or a preset's name")
    source.add_argument("--profile", metavar="FILE", type=Path, help="what `profile` wrote; no torch is needed then")


def _add_workload_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequence-length", type=int, default=TrainingWorkload.sequence_length, metavar="TOKENS")
    parser.add_argument("--batch", type=int, default=TrainingWorkload.global_batch_size, metavar="SEQUENCES")
    parser.add_argument("--steps", type=int, default=TrainingWorkload.num_steps, help="for the total time")
    parser.add_argument("--budget", metavar="SIZE", help='of device memory, such as "6 GiB"; all there is unless given')
    parser.add_argument("--host-budget", metavar="SIZE", help="of host memory; all there is unless given")
    parser.add_argument("--disk-budget", metavar="SIZE", help="of the scratch disk; all there is unless given")
    parser.add_argument(
        "--max-grad-norm",
        type=float,
        default=TrainingWorkload.max_grad_norm,
        metavar="NORM",
        help="gradients are clipped to this global norm; 0 for no clipping",
    )
    parser.add_argument(
        "--optimizer",
        choices=get_args(OptimizerName),
        default=TrainingWorkload.optimizer,
        help="adamw keeps two numbers of state for each weight, sgd one, or none without momentum",
    )
    parser.add_argument("--momentum", type=float, default=TrainingWorkload.momentum, help="of sgd; 0 for none")


def _add_machine_options(parser: argparse.ArgumentParser) -> None:
    machine = parser.add_mutually_exclusive_group()
    machine.add_argument("--gpu", metavar="NAME", help="a card of the built-in table, such as 'RTX 4090'")
    machine.add_argument("--machine", metavar="FILE", type=Path, help="what `probe --json` wrote")


def _read_problem(options: argparse.Namespace) -> tuple[SearchProblem, Machine, Profile]:
    """Cheap checks first: a wrong number is reported before a model is profiled."""
    workload = TrainingWorkload(
        sequence_length=options.sequence_length,
        global_batch_size=options.batch,
        num_steps=options.steps,
        max_grad_norm=options.max_grad_norm or None,
        optimizer=options.optimizer,
        momentum=options.momentum,
    )
    budget_bytes, host_budget_bytes, disk_budget_bytes = (
        _parse_size(name, getattr(options, name.replace("-", "_"))) for name in ("budget", "host-budget", "disk-budget")
    )
    machine = _read_machine(options)
    goal = Goal(
        device_budget_bytes=machine.device.memory_bytes if budget_bytes is None else budget_bytes,
        host_budget_bytes=host_budget_bytes,
        disk_budget_bytes=disk_budget_bytes,
        allow_lossy=getattr(options, "allow_lossy", True),
        forbid=tuple(getattr(options, "forbid", ())),
    )
    profile = _read_profile(options.profile) if options.profile else _profile_model(options.model)
    return training_problem(profile, workload=workload, goal=goal, machine=machine), machine, profile


def _parse_size(name: str, text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise InvalidInput(f"--{name}: {error}", field=name, value=text, allowed="a size such as 6 GiB") from error


def _read_machine(options: argparse.Namespace) -> Machine:
    if options.gpu:
        return table_machine(options.gpu)
    if options.machine:
        return Machine.from_json(_read_json(options.machine, field="machine"))
    from optimizer.hardware.probe import probe_machine

    print("measuring this machine ...", file=sys.stderr)
    return probe_machine()


def _read_profile(path: Path) -> Profile:
    return Profile.from_json(_read_json(path, field="profile"))


def _profile_model(name: str) -> Profile:
    """Trace the named model; needs torch, and seconds."""
    path = Path(name)
    if name in PRESETS:
        spec = PRESETS[name].spec
    elif path.exists():
        spec = read_model_spec(_read_json(path / "config.json" if path.is_dir() else path, field="model"))
    else:
        raise InvalidInput(
            f"model {name!r} is neither a file nor a preset; presets: {', '.join(PRESETS)}",
            field="model",
            value=name,
            allowed=list(PRESETS),
        )
    from optimizer.profile.trace import profile_model

    return profile_model(spec)


def _read_plan(name: str, problem: SearchProblem) -> Plan:
    if name in BASELINES:
        setting, per_block = BASELINES[name](problem)
        return setting.plan(per_block)
    if not Path(name).exists():
        raise InvalidInput(
            f"plan {name!r} is neither a file nor one of {', '.join(BASELINES)}",
            field="plan",
            value=name,
            allowed=list(BASELINES),
        )
    document = _read_json(Path(name), field="plan")
    chosen = document.get("chosen", document) if isinstance(document, dict) else document
    return Plan.from_json(chosen.get("plan", chosen) if isinstance(chosen, dict) else chosen)


def _read_json(path: Path, *, field: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"--{field} {path}: {error.strerror}", field=field, value=str(path)) from error
    except ValueError as error:
        raise InvalidInput(f"--{field} {path} is not JSON: {error}", field=field, value=str(path)) from error


def _write_json(path: Path, document: Any) -> None:
    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}", field="output", value=str(path)) from error


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    sys.exit(main())
