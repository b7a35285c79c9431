"""Planning from the command line, without any service: ``python -m optimizer.cli plan|estimate|profile|probe``.

``plan`` searches, ``estimate`` prices one plan and explains it, ``profile`` writes a model's profile to a file, ``probe``
measures this machine. The same commands appear in ``headroom`` through ``add_subcommands``. An error is one line and a hint on
standard error, exit code 2. This process imports torch only to write a profile or to measure this machine: what ``plan`` and
``estimate`` need of a model is kept, or traced by a child (``profile/obtain.py``).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from optimizer.cli_adapters import add_adapter_options, pack_frozen, read_adapter
from optimizer.cli_generation import add_generation_options, asks_for_generation, run_generation
from optimizer.errors import HeadroomError, InvalidInput
from optimizer.estimating import BEST, estimate_model, estimate_profiled, needed_extent, read_json, read_model
from optimizer.estimating_generation import report_generation
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Machine
from optimizer.hardware.prices import price_run, read_prices
from optimizer.models.targets import check_targets
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.obtain import obtain_profile
from optimizer.profile.profile import Profile
from optimizer.reports import report_machine, report_profile, report_search
from optimizer.reports_estimate import report_costs, report_estimate
from optimizer.search.baselines import BASELINES
from optimizer.search.core import search
from optimizer.search.problem import SearchProblem
from optimizer.search.search import training_problem
from optimizer.serialize import to_json
from optimizer.techniques import TECHNIQUE_LABELS
from optimizer.units import parse_bytes
from optimizer.workload import LOSSY, Goal, OptimizerName, TrainingWorkload

_DTYPES: dict[str, WeightsPlan] = {
    "fp32": WeightsPlan(),
    "bf16": WeightsPlan(dtype="bf16"),
    "fp16": WeightsPlan(dtype="fp16"),
    "autocast-bf16": WeightsPlan(autocast="bf16"),
    "autocast-fp16": WeightsPlan(autocast="fp16"),
}


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
    add_adapter_options(plan)
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

    estimate = commands.add_parser("estimate", help="say what training takes in bytes and milliseconds, and why")
    _add_model_options(estimate)
    _add_workload_options(estimate)
    _add_machine_options(estimate)
    estimate.add_argument(
        "--plan",
        help=f"best, {', '.join(BASELINES)}, or a file with a plan's JSON; plain training and the best beside it unless given",
    )
    estimate.add_argument("--dtype", choices=list(_DTYPES), default="fp32", help="of the weights, where no plan says it")
    estimate.add_argument("--allow-lossy", action="store_true", help="let the best plan change the numbers")
    estimate.add_argument("--explain", action="store_true", help="where bytes and time are, and what each knob would buy")
    estimate.add_argument("--json", action="store_true", help="print all of it as JSON")
    add_adapter_options(estimate)
    add_generation_options(estimate)
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
    """Cheap checks first: a wrong number is reported before a model is profiled."""
    workload = _read_workload(options)
    machine = _read_machine(options)
    weights = _DTYPES[options.dtype]
    goal = _read_goal(options, machine)
    if asks_for_generation(options):
        if workload.adapter is not None:
            raise InvalidInput(
                "--lora is of training; a model generates with its adapters merged", field="lora", value=options.lora
            )
        return _run_generation(options, weights=weights, machine=machine, budget_bytes=goal.device_budget_bytes)
    weights = pack_frozen(weights, options)
    if weights != WeightsPlan():
        goal = _allowing(goal, weights)
    asked: dict[str, Any] = {
        "machine": machine,
        "workload": workload,
        "plan": _read_plan(options.plan),
        "goal": goal,
        "weights": weights,
        "with_knobs": options.explain,
    }
    if options.profile:
        profile = _read_profile(options.profile)
        estimate = estimate_profiled(profile, **asked)
    else:
        estimate = estimate_model(options.model, **asked)
    costs = price_run(
        read_prices(),
        device=machine.device.name,
        total_s=estimate.priced.prediction.total_s,
        num_tokens=workload.num_steps * workload.tokens_per_step,
    )
    if options.json:
        _print_json({**estimate.to_json(), **estimate.priced.to_json(), "costs": to_json(costs)})
    else:
        print(report_estimate(estimate, is_explained=options.explain))
        print(f"\n{report_costs(costs, device=machine.device.name, num_steps=workload.num_steps)}")
    return 0


def _run_generation(
    options: argparse.Namespace, *, weights: WeightsPlan, machine: Machine, budget_bytes: int
) -> int:
    if not options.model:
        raise InvalidInput(
            f"--profile {options.profile} is of training; to generate name the --model",
            field="profile",
            value=str(options.profile),
        )
    estimate = run_generation(
        options, spec=read_model(options.model), weights=weights, machine=machine, budget_bytes=budget_bytes
    )
    if options.json:
        _print_json(estimate.to_json())
    else:
        print(report_generation(estimate))
    return 0


def run_profile(options: argparse.Namespace) -> int:
    from optimizer.profile.trace import profile_model

    profile = profile_model(read_model(options.model))
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
    workload = _read_workload(options)
    machine = _read_machine(options)
    goal = _read_goal(options, machine)
    if options.profile:
        profile = _read_profile(options.profile)
    else:
        spec = read_model(options.model)
        if workload.adapter is not None:
            check_targets(workload.adapter, spec.model_type)
        extent = needed_extent(spec.num_blocks, BEST, workload=workload, goal=goal)
        profile = obtain_profile(spec, adapter=workload.adapter, extent=extent)
    return training_problem(profile, workload=workload, goal=goal, machine=machine), machine, profile


def _read_workload(options: argparse.Namespace) -> TrainingWorkload:
    return TrainingWorkload(
        sequence_length=options.sequence_length,
        global_batch_size=options.batch,
        num_steps=options.steps,
        max_grad_norm=options.max_grad_norm or None,
        optimizer=options.optimizer,
        momentum=options.momentum,
        adapter=read_adapter(options),
    )


def _read_goal(options: argparse.Namespace, machine: Machine) -> Goal:
    budget_bytes, host_budget_bytes, disk_budget_bytes = (
        _parse_size(name, getattr(options, name.replace("-", "_"))) for name in ("budget", "host-budget", "disk-budget")
    )
    return Goal(
        device_budget_bytes=machine.device.memory_bytes if budget_bytes is None else budget_bytes,
        host_budget_bytes=host_budget_bytes,
        disk_budget_bytes=disk_budget_bytes,
        allow_lossy=options.allow_lossy,
        forbid=tuple(getattr(options, "forbid", ())),
    )


def _allowing(goal: Goal, weights: WeightsPlan) -> Goal:
    """Besides what is lossless the dtype and the packing that were asked for, unless everything was allowed."""
    if goal.allow_lossy:
        return goal
    asked: set[str] = {"autocast" if weights.autocast != "off" else weights.dtype}
    if weights.frozen != "same":
        asked.add("quantize_frozen")
    return replace(goal, allow_lossy=True, forbid=(*goal.forbid, *(name for name in LOSSY if name not in asked)))


def _parse_size(name: str, text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise InvalidInput(f"--{name}: {error}", field=name, value=text, allowed="a size such as 6 GiB") from error


def _read_machine(options: argparse.Namespace) -> Machine:
    if options.gpu is not None:
        return table_machine(options.gpu)
    if options.machine:
        return Machine.from_json(read_json(options.machine, field="machine"))
    from optimizer.hardware.probe import probe_machine

    print("measuring this machine ...", file=sys.stderr)
    return probe_machine()


def _read_profile(path: Path) -> Profile:
    return Profile.from_json(read_json(path, field="profile"))


def _read_plan(name: str | None) -> str | Plan | None:
    if name is None or name == BEST or name in BASELINES:
        return name
    if "\0" in name or not Path(name).exists():
        allowed = [BEST, *BASELINES]
        raise InvalidInput(
            f"plan {name!r} is neither a file nor one of {', '.join(allowed)}", field="plan", value=name, allowed=allowed
        )
    document = read_json(Path(name), field="plan")
    chosen = document.get("chosen", document) if isinstance(document, dict) else document
    return Plan.from_json(chosen.get("plan", chosen) if isinstance(chosen, dict) else chosen)


def _write_json(path: Path, document: Any) -> None:
    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}", field="output", value=str(path)) from error


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    sys.exit(main())
