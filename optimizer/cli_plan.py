"""``plan``: the best plan for a goal, what it is held against, and why."""

import argparse

from optimizer.cli_adapters import add_adapter_options
from optimizer.cli_options import (
    add_machine_options,
    add_model_options,
    add_workload_options,
    print_json,
    read_goal,
    read_machine,
    read_profile,
    read_workload,
)
from optimizer.estimating import BEST, needed_extent, read_model
from optimizer.hardware.machine import Machine
from optimizer.models.targets import check_targets
from optimizer.plan.pins import list_knobs_to_pin
from optimizer.profile.obtain import obtain_profile
from optimizer.profile.profile import Profile
from optimizer.reports import report_search
from optimizer.search.core import search
from optimizer.search.problem import SearchProblem
from optimizer.search.search import training_problem
from optimizer.techniques import TECHNIQUE_LABELS


def add_plan_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    plan = commands.add_parser("plan", help="find the fastest plan that fits a memory budget")
    add_model_options(plan)
    add_workload_options(plan)
    add_machine_options(plan)
    add_adapter_options(plan)
    goal = plan.add_argument_group("goal")
    goal.add_argument("--allow-lossy", action="store_true", help="also choices that change the numbers, such as bf16")
    goal.add_argument(
        "--forbid",
        action="append",
        default=[],
        choices=list(TECHNIQUE_LABELS),
        metavar="TECHNIQUE",
        help=f"a technique not to use, several times for several: {', '.join(TECHNIQUE_LABELS)}",
    )
    goal.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="KNOB=VALUE",
        help=f"a decision that is made already, several times for several: {', '.join(list_knobs_to_pin())}",
    )
    plan.add_argument("--json", action="store_true", help="print the result as JSON")
    plan.set_defaults(run=run_plan)


def run_plan(options: argparse.Namespace) -> int:
    problem, machine, profile = _read_problem(options)
    result = search(problem)
    if options.json:
        print_json({"machine": machine.to_json(), **result.to_json()})
    else:
        print(report_search(result, problem=problem, machine=machine, profile=profile))
    return 0


def _read_problem(options: argparse.Namespace) -> tuple[SearchProblem, Machine, Profile]:
    """Cheap checks first: a wrong number is reported before a model is profiled."""
    workload = read_workload(options)
    machine = read_machine(options)
    goal = read_goal(options, machine)
    if options.profile:
        profile = read_profile(options.profile)
    else:
        spec = read_model(options.model)
        if workload.adapter is not None:
            check_targets(workload.adapter, spec.model_type)
        extent = needed_extent(spec.num_blocks, BEST, workload=workload, goal=goal)
        profile = obtain_profile(spec, adapter=workload.adapter, extent=extent)
    return training_problem(profile, workload=workload, goal=goal, machine=machine), machine, profile


