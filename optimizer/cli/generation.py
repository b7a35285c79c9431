"""The side of ``estimate`` and ``plan`` that generates, which ``--prompt-length`` or ``--new-tokens`` asks for."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from optimizer.api.estimate_generation import estimate_model_generation
from optimizer.api.inputs import BEST, read_config, read_json, read_model
from optimizer.api.needs import check_plan_label
from optimizer.api.plan_generation import compare_model_generations, plan_generation, rank_model_cards_to_generate
from optimizer.base.errors import InvalidInput
from optimizer.base.serialize import to_json
from optimizer.cli.options import read_beside
from optimizer.cli.progress import ProgressLine
from optimizer.cli.reports.generation import report_generation, report_generation_comparison, report_generation_search
from optimizer.cli.reports.plan import report_cards
from optimizer.goal import GenerationGoal, GenerationObjective, Goal
from optimizer.hardware.machine import Machine
from optimizer.hardware.rental import price_run, read_prices
from optimizer.models.spec import ModelSpec
from optimizer.models.unread import describe_unread
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.pins.generation import GenerationPins
from optimizer.plan.techniques import LOSSY, Technique
from optimizer.plan.weights import FrozenFormat, WeightsPlace, WeightsPlan
from optimizer.search.generation.baselines import GENERATION_BASELINES
from optimizer.search.questions.cards import Order
from optimizer.workload import GenerationWorkload


def add_generation_options(parser: argparse.ArgumentParser, *, has_plan: bool = True) -> None:
    """To ``estimate``, whose ``--batch`` is here the sequences that run at once, or to ``plan``, which decides them.

    has_plan: whether a plan is given, and not looked for.
    """
    group = parser.add_argument_group("generating", "with either of the first two, what a batch generation takes")
    group.add_argument("--prompt-length", type=int, metavar="TOKENS", help="of each prompt")
    group.add_argument("--new-tokens", type=int, metavar="TOKENS", help="generated after each prompt")
    group.add_argument("--sequences", type=int, metavar="COUNT", help="prompts in all; as many as run at once unless given")
    group.add_argument(
        "--generate-for",
        choices=get_args(GenerationObjective),
        default="throughput",
        help="what the best plan is best at: all prompts in the least time, the first token, or most sequences at once",
    )
    if has_plan:
        forms, places = get_args(FrozenFormat), get_args(WeightsPlace)
        group.add_argument("--pack", choices=forms, default="same", help="how the blocks' matrices are held")
        group.add_argument("--weights", choices=places, default="device", help="where blocks keep their weights between uses")
        group.add_argument(
            "--micro-batches",
            type=int,
            default=1,
            metavar="COUNT",
            help="of --batch sequences each, which share every pass over the weights",
        )


def asks_for_generation(options: argparse.Namespace) -> bool:
    return options.prompt_length is not None or options.new_tokens is not None


def run_generation_estimate(options: argparse.Namespace, *, weights: WeightsPlan, machine: Machine, goal: Goal) -> Any:
    """weights: the dtype that was asked for. Returns what is printed: a text, or a document."""
    spec, workload = _read_spec(options), _read_workload(options)
    weights = WeightsPlan(dtype=weights.dtype, autocast=weights.autocast, frozen=options.pack, place=options.weights)
    plan: GenerationPlan | str = _read_plan(options.plan) or GenerationPlan(
        batch_size=options.batch, num_micro_batches=options.micro_batches, weights=weights
    )
    estimate = estimate_model_generation(
        spec,
        plan=plan,
        workload=workload,
        machine=machine,
        goal=read_generation_goal(options, goal, weights=weights),
        weights=weights,
    )
    config = read_config(options.model)
    if config is not None:
        estimate = replace(estimate, unread=describe_unread(config, spec))
    costs = price_run(
        read_prices(),
        device=machine.device.name,
        total_s=estimate.prediction.total_s,
        interval_s=estimate.prediction.total_interval_s,
        num_tokens=workload.num_sequences * workload.num_new_tokens,
    )
    if options.json:
        return {**estimate.to_json(), **estimate.priced.to_json(), "costs": to_json(costs)}
    return report_generation(estimate, is_explained=options.explain)


def run_generation_plan(options: argparse.Namespace, *, machine: Machine, goal: GenerationGoal) -> Any:
    """The best plan beside baselines, or plans side by side; a text, or a document.

    Raises InvalidInput for what is asked of training alone.
    """
    _refuse_training(options)
    spec, workload = _read_spec(options), _read_workload(options)
    here: dict[str, Any] = {"machine": machine, "workload": workload, "goal": goal}
    if options.compare:
        plans = {Path(name).name: _read_plan(name) or BEST for name in options.compare}
        comparison = compare_model_generations(spec, plans, **here)
        if options.json:
            return {"machine": machine.to_json(), **comparison.to_json()}
        return report_generation_comparison(comparison)
    result = plan_generation(spec, **here)
    if options.json:
        return {"machine": machine.to_json(), **result.to_json()}
    return report_generation_search(
        result,
        model=f"{spec.model_type}, {spec.num_blocks} blocks",
        workload=workload,
        goal=goal,
        machine=machine,
        host_budget_bytes=machine.host_memory_bytes if goal.host_budget_bytes is None else goal.host_budget_bytes,
    )


def run_generation_cards(options: argparse.Namespace, names: list[str], *, goal: GenerationGoal) -> Any:
    """Cards of the table ranked: a text, or a document. Raises InvalidInput for what is asked of training alone."""
    _refuse_training(options)
    spec, workload = _read_spec(options), _read_workload(options)
    order: Order = "money" if options.objective == "cheapest_run" else "speed"
    with ProgressLine("cards") as progress:
        answers = rank_model_cards_to_generate(
            spec, names, workload=workload, goal=goal, order=order, progress=progress, beside=read_beside(options)
        )
    if options.json:
        return {"order": order, "cards": to_json(answers)}
    return report_cards(answers, num_tokens=workload.total_new_tokens)


def _refuse_training(options: argparse.Namespace) -> None:
    for name in ("lora", "models"):
        value = getattr(options, name, None)
        if value is not None:
            raise InvalidInput(f"--{name} is of plans to train; leave it out to plan a generation", field=name, value=str(value))
    if options.objective not in ("fastest_step", "cheapest_run"):
        name = options.objective.replace("_", "-")
        raise InvalidInput(
            f"--objective {name} is of plans to train; what a generation's plan is best at is said by --generate-for",
            field="objective",
            value=options.objective,
            allowed=list(get_args(GenerationObjective)),
        )


def _read_spec(options: argparse.Namespace) -> ModelSpec:
    if not options.model:
        raise InvalidInput(
            f"--profile {options.profile} is of training; to generate name the --model",
            field="profile",
            value=str(options.profile),
        )
    return read_model(options.model)


def _read_workload(options: argparse.Namespace) -> GenerationWorkload:
    at_once = options.batch * getattr(options, "micro_batches", 1)
    given: dict[str, Any] = {"prompt_length": options.prompt_length, "num_new_tokens": options.new_tokens}
    return GenerationWorkload(
        num_sequences=at_once if options.sequences is None else options.sequences,
        **{name: value for name, value in given.items() if value is not None},
    )


def read_generation_goal(
    options: argparse.Namespace, goal: Goal, *, weights: WeightsPlan | None = None, pins: GenerationPins | None = None
) -> GenerationGoal:
    """goal: as of training, of which budgets and what is allowed are taken. weights: beside what is lossless the dtype and the
    packing that were asked for, unless everything was allowed.
    """
    weights = weights or WeightsPlan()
    forbid: tuple[Technique, ...] = goal.forbid
    asked = {weights.dtype, *(["quantize_frozen"] if weights.frozen != "same" else [])} - {"fp32"}
    if asked and not goal.allow_lossy:
        forbid = (*forbid, *(technique for technique in LOSSY if technique not in asked))
    if goal.allow_lossy:
        forbid = (*forbid, *(found for found in LOSSY if found not in asked and not goal.allows_loss_by(found)))
    return GenerationGoal(
        device_budget_bytes=goal.device_budget_bytes,
        host_budget_bytes=goal.host_budget_bytes,
        disk_budget_bytes=goal.disk_budget_bytes,
        objective=options.generate_for,
        allow_lossy=goal.allow_lossy or bool(asked),
        forbid=forbid,
        pins=pins or GenerationPins(),
        num_devices=goal.num_devices,
    )


def _read_plan(name: str | None) -> GenerationPlan | str | None:
    """None where none was named. Raises InvalidInput for what is neither a label nor a file."""
    if name is None or name == BEST or name in GENERATION_BASELINES:
        return name
    if "\0" in name or not Path(name).exists():
        check_plan_label(name)
    document = read_json(Path(name), field="plan")
    chosen = document.get("chosen", document) if isinstance(document, dict) else document
    return GenerationPlan.from_json(chosen.get("plan", chosen) if isinstance(chosen, dict) else chosen)
