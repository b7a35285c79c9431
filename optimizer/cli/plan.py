"""``plan``: the best plan for a goal, what it is held against, and why; plans side by side; cards ranked."""

import argparse
import sys
from pathlib import Path
from typing import Any, get_args

from optimizer.api.inputs import BEST
from optimizer.api.plan import (
    compare_model,
    compare_profiled,
    largest_of_models,
    plan_model,
    plan_profiled,
    rank_cards_profiled,
    rank_model_cards,
)
from optimizer.base.errors import InvalidInput, NoFeasiblePlan
from optimizer.base.serialize import to_json
from optimizer.cli.adapters import add_adapter_options
from optimizer.cli.generation import (
    add_generation_options,
    asks_for_generation,
    read_generation_goal,
    run_generation_cards,
    run_generation_plan,
)
from optimizer.cli.options import (
    add_devices_options,
    add_machine_options,
    add_model_options,
    add_workload_options,
    print_answer,
    print_json,
    read_beside,
    read_goal,
    read_machine,
    read_plan,
    read_profile,
    read_workload,
)
from optimizer.cli.progress import ProgressLine
from optimizer.cli.reports.plan import report_answer, report_cards, report_comparison, report_ways_out
from optimizer.goal import Goal, Loss, Objective
from optimizer.hardware.machine import Machine
from optimizer.plan.pins.generation_knobs import generation_knobs, read_generation_pins
from optimizer.plan.pins.training import list_knobs_to_pin, read_pins
from optimizer.plan.techniques import TECHNIQUE_LABELS
from optimizer.search.answer.baselines import BASELINES
from optimizer.search.generation.baselines import GENERATION_BASELINES
from optimizer.search.questions.answers import ObjectiveAnswer
from optimizer.search.questions.cards import Order
from optimizer.workload import TrainingWorkload


def add_plan_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    plan = commands.add_parser("plan", help="find the fastest plan that fits a memory budget")
    add_model_options(plan)
    add_workload_options(plan)
    add_machine_options(plan)
    add_devices_options(plan)
    add_adapter_options(plan)
    goal = plan.add_argument_group("goal")
    goal.add_argument(
        "--allow-lossy",
        nargs="?",
        const="any",
        choices=get_args(Loss),
        help="also choices that change the numbers; rounding: only as training in 16 bits does (16-bit numbers, 8-bit state)",
    )
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
        help=f"a decision that is made already, several times for several: {', '.join(list_knobs_to_pin())}; "
        f"of a generation {', '.join(generation_knobs())}",
    )
    goal.add_argument(
        "--objective",
        type=lambda text: text.replace("-", "_"),
        choices=get_args(Objective),
        default="fastest_step",
        metavar="OBJECTIVE",
        help="what is best: fastest-step, cheapest-run (with --gpus), largest-batch, longest-sequence, largest-model",
    )
    goal.add_argument(
        "--models",
        nargs="+",
        metavar="CONFIG_OR_PRESET",
        help="with --objective largest-model: which of these and --model is the largest that fits, instead of how deep",
    )
    instead = plan.add_argument_group("instead of one plan").add_mutually_exclusive_group()
    instead.add_argument(
        "--compare",
        nargs="+",
        metavar="PLAN",
        help=f"plans side by side: {BEST}, {', '.join(BASELINES)}, or files with a plan's JSON; "
        f"of a generation {BEST}, {', '.join(GENERATION_BASELINES)}, or files",
    )
    instead.add_argument(
        "--gpus",
        metavar="NAMES",
        help="rank cards, by tokens per second or, with --objective cheapest-run, by money: all, or names parted by commas",
    )
    add_generation_options(plan, has_plan=False)
    plan.add_argument("--json", action="store_true", help="print the result as JSON")
    plan.set_defaults(run=run_plan)


def run_plan(options: argparse.Namespace) -> int:
    """Cheap checks first: a wrong number is reported before a model is profiled."""
    if options.models and (options.objective != "largest_model" or not options.model):
        raise InvalidInput(
            "--models is for --objective largest-model, beside --model", field="models", value=options.models
        )
    if options.gpus is not None and (options.gpu is not None or options.machine):
        raise InvalidInput("--gpus ranks cards; --gpu and --machine name one", field="gpus", value=options.gpus)
    if options.devices is not None and (options.gpus is not None or options.compare):
        raise InvalidInput(
            "--devices is for one plan, of training or of a generation; --gpus and --compare are for one device",
            field="devices",
            value=options.devices,
        )
    if asks_for_generation(options):
        return _generation(options)
    workload, pins = read_workload(options), read_pins(options.pin)
    if options.gpus is not None:
        return _rank_cards(options, workload, read_goal(options, None, pins=pins))
    machine = read_machine(options)
    goal = read_goal(options, machine, pins=pins)
    if options.compare:
        return _compare(options, workload, goal, machine)
    try:
        answer = _answer(options, workload, goal, machine)
    except NoFeasiblePlan as error:
        if not options.json:
            error.hint = report_ways_out(error)
            raise
        print_json({"machine": machine.to_json(), "error": error.to_json()})
        return 2
    if options.json:
        asked = {name: value for name, value in answer.to_json().items() if name != "result"}
        print_json({"machine": machine.to_json(), **answer.result.to_json(), **asked})
    else:
        print(report_answer(answer, machine=machine))
    return 0


def _generation(options: argparse.Namespace) -> int:
    pins = read_generation_pins(options.pin)
    if options.gpus is not None:
        goal = read_generation_goal(options, read_goal(options, None), pins=pins)
        print_answer(run_generation_cards(options, _read_cards(options), goal=goal))
        return 0
    machine = read_machine(options)
    goal = read_generation_goal(options, read_goal(options, machine), pins=pins)
    try:
        print_answer(run_generation_plan(options, machine=machine, goal=goal))
    except NoFeasiblePlan as error:
        if not options.json:
            raise
        print_json({"machine": machine.to_json(), "error": error.to_json()})
        return 2
    return 0


def _answer(options: argparse.Namespace, workload: TrainingWorkload, goal: Goal, machine: Machine) -> ObjectiveAnswer:
    if options.profile:
        return plan_profiled(read_profile(options.profile), machine=machine, workload=workload, goal=goal)
    if not options.models:
        return plan_model(options.model, machine=machine, workload=workload, goal=goal)
    models = [options.model, *options.models]
    model, answer = largest_of_models(models, machine=machine, workload=workload, goal=goal)
    print(f"of {', '.join(models)} the largest that fits is {model}\n", file=sys.stderr)
    return answer


def _compare(options: argparse.Namespace, workload: TrainingWorkload, goal: Goal, machine: Machine) -> int:
    plans = {Path(name).name: read_plan(name) or BEST for name in options.compare}
    asked: dict[str, Any] = {"machine": machine, "workload": workload, "goal": goal}
    if options.profile:
        comparison = compare_profiled(read_profile(options.profile), plans, **asked)
    else:
        comparison = compare_model(options.model, plans, **asked)
    if options.json:
        print_json({"machine": machine.to_json(), **comparison.to_json()})
    else:
        print(report_comparison(comparison))
    return 0


def _read_cards(options: argparse.Namespace) -> list[str]:
    return [name.strip() for name in options.gpus.split(",")]


def _rank_cards(options: argparse.Namespace, workload: TrainingWorkload, goal: Goal) -> int:
    names = _read_cards(options)
    order: Order = "money" if goal.objective == "cheapest_run" else "speed"
    asked: dict[str, Any] = {"workload": workload, "goal": goal, "order": order}
    with ProgressLine("cards") as progress:
        asked |= {"beside": read_beside(options)}
        if options.profile:
            answers = rank_cards_profiled(read_profile(options.profile), names, progress=progress, **asked)
        else:
            answers = rank_model_cards(options.model, names, progress=progress, **asked)
    if options.json:
        print_json({"order": order, "cards": to_json(answers)})
    else:
        print(report_cards(answers, num_tokens=workload.num_steps * workload.tokens_per_step))
    return 0
