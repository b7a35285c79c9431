"""``estimate``: what one plan takes in bytes and milliseconds, and why; of training, or of generating."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from optimizer.api.estimate import estimate_model, estimate_profiled
from optimizer.api.estimate_padded import estimate_padded_model, read_lengths
from optimizer.base.errors import InvalidInput
from optimizer.base.serialize import to_json
from optimizer.cli.adapters import add_adapter_options, pack_frozen
from optimizer.cli.generation import add_generation_options, asks_for_generation, run_generation_estimate
from optimizer.cli.options import (
    add_machine_options,
    add_model_options,
    add_workload_options,
    print_answer,
    print_json,
    read_goal,
    read_machine,
    read_plan,
    read_profile,
    read_workload,
)
from optimizer.cli.reports.estimate import report_costs, report_estimate, report_padded
from optimizer.goal import Goal
from optimizer.hardware.machine import Machine
from optimizer.hardware.rental import price_run, read_prices
from optimizer.plan.techniques import LOSSY
from optimizer.plan.weights import WeightsPlan
from optimizer.search.answer.baselines import BASELINES
from optimizer.workload import TrainingWorkload

_DTYPES: dict[str, WeightsPlan] = {
    "fp32": WeightsPlan(),
    "bf16": WeightsPlan(dtype="bf16"),
    "fp16": WeightsPlan(dtype="fp16"),
    "autocast-bf16": WeightsPlan(autocast="bf16"),
    "autocast-fp16": WeightsPlan(autocast="fp16"),
}


def add_estimate_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    estimate = commands.add_parser("estimate", help="say what training takes in bytes and milliseconds, and why")
    add_model_options(estimate)
    add_workload_options(estimate)
    add_machine_options(estimate)
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
    padding = estimate.add_argument_group("padded batches", "of a dataset whose batches are padded to their longest sequence")
    padding.add_argument(
        "--lengths", type=Path, metavar="FILE", help="tokens of each sequence, one a line or a JSON list: the worst batch decides"
    )
    padding.add_argument("--pad-to-multiple", type=int, default=1, metavar="TOKENS", help="of padded lengths")
    estimate.set_defaults(run=run_estimate)


def run_estimate(options: argparse.Namespace) -> int:
    """Cheap checks first: a wrong number is reported before a model is profiled."""
    workload = read_workload(options)
    machine = read_machine(options)
    weights = _DTYPES[options.dtype]
    goal = read_goal(options, machine)
    if asks_for_generation(options):
        if workload.adapter is not None:
            raise InvalidInput(
                "--lora is of training; a model generates with its adapters merged", field="lora", value=options.lora
            )
        print_answer(run_generation_estimate(options, weights=weights, machine=machine, goal=goal))
        return 0
    weights = pack_frozen(weights, options)
    if options.lengths is not None:
        _run_padded(options, machine=machine, workload=workload, goal=goal, weights=weights)
        return 0
    if weights != WeightsPlan():
        goal = _allowing(goal, weights)
    asked: dict[str, Any] = {
        "machine": machine,
        "workload": workload,
        "plan": read_plan(options.plan),
        "goal": goal,
        "weights": weights,
        "with_knobs": options.explain,
    }
    if options.profile:
        profile = read_profile(options.profile)
        estimate = estimate_profiled(profile, **asked)
    else:
        estimate = estimate_model(options.model, **asked)
    costs = price_run(
        read_prices(),
        device=machine.device.name,
        total_s=estimate.priced.prediction.total_s,
        interval_s=estimate.priced.prediction.total_interval_s,
        num_tokens=workload.num_steps * workload.tokens_per_step,
    )
    if options.json:
        print_json({**estimate.to_json(), **estimate.priced.to_json(), "costs": to_json(costs)})
    else:
        print(report_estimate(estimate, is_explained=options.explain))
        print(f"\n{report_costs(costs, device=machine.device.name, num_steps=workload.num_steps)}")
    return 0


def _run_padded(
    options: argparse.Namespace, *, machine: Machine, workload: TrainingWorkload, goal: Goal, weights: WeightsPlan
) -> None:
    if not options.model:
        raise InvalidInput(
            f"--profile {options.profile} is of batches of one length; for padded ones name the --model",
            field="profile",
            value=str(options.profile),
        )
    estimate = estimate_padded_model(
        options.model,
        machine=machine,
        lengths=read_lengths(options.lengths),
        workload=workload,
        plan=read_plan(options.plan) or "keep_all",
        goal=goal,
        weights=weights,
        pad_to_multiple=options.pad_to_multiple,
    )
    print_answer(estimate.to_json() if options.json else report_padded(estimate))


def _allowing(goal: Goal, weights: WeightsPlan) -> Goal:
    """Besides what is lossless the dtype and the packing that were asked for, unless everything was allowed."""
    if goal.allow_lossy:
        return goal
    asked: set[str] = {"autocast" if weights.autocast != "off" else weights.dtype}
    if weights.frozen != "same":
        asked.add("quantize_frozen")
    return replace(goal, allow_lossy=True, forbid=(*goal.forbid, *(name for name in LOSSY if name not in asked)))
