"""What ``estimate`` takes where it is asked about generating: with ``--prompt-length`` or ``--new-tokens`` it is."""

import argparse
from typing import Any, get_args

from optimizer.errors import InvalidInput
from optimizer.estimating_generation import GenerationEstimate, estimate_generation
from optimizer.hardware.machine import Machine
from optimizer.models.spec import ModelSpec
from optimizer.plan.inference import InferencePlan
from optimizer.plan.weights import FrozenFormat, WeightsPlace, WeightsPlan
from optimizer.workload import InferenceWorkload


def add_generation_options(parser: argparse.ArgumentParser) -> None:
    """To the options of ``estimate``, whose ``--batch`` is here the sequences that run at once."""
    group = parser.add_argument_group("generating", "with either of the first two, what a batch generation takes")
    group.add_argument("--prompt-length", type=int, metavar="TOKENS", help="of each prompt")
    group.add_argument("--new-tokens", type=int, metavar="TOKENS", help="generated after each prompt")
    group.add_argument("--sequences", type=int, metavar="COUNT", help="prompts in all; as many as run at once unless given")
    group.add_argument("--pack", choices=get_args(FrozenFormat), default="same", help="form of blocks' matrices, of --lora too")
    group.add_argument(
        "--weights", choices=get_args(WeightsPlace), default="device", help="where blocks keep their weights between uses"
    )


def asks_for_generation(options: argparse.Namespace) -> bool:
    return options.prompt_length is not None or options.new_tokens is not None


def run_generation(
    options: argparse.Namespace, *, spec: ModelSpec, weights: WeightsPlan, machine: Machine, budget_bytes: int
) -> GenerationEstimate:
    """weights: the dtype that was asked for."""
    if options.plan is not None:
        raise InvalidInput(
            f"--plan {options.plan} is a plan to train; to generate say --batch, --dtype, --pack and --weights",
            field="plan",
            value=options.plan,
        )
    defaults: dict[str, Any] = {"prompt_length": options.prompt_length, "num_new_tokens": options.new_tokens}
    workload = InferenceWorkload(
        num_sequences=options.batch if options.sequences is None else options.sequences,
        **{name: value for name, value in defaults.items() if value is not None},
    )
    plan = InferencePlan(
        batch_size=options.batch,
        weights=WeightsPlan(dtype=weights.dtype, autocast=weights.autocast, frozen=options.pack, place=options.weights),
    )
    return estimate_generation(spec, plan=plan, workload=workload, machine=machine, budget_bytes=budget_bytes)
