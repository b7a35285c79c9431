"""Options of ``plan`` and ``estimate`` for adapters beside frozen weights, which ``--lora`` asks for."""

import argparse
from dataclasses import replace

from optimizer.base.errors import InvalidInput
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import Adapter


def add_adapter_options(parser: argparse.ArgumentParser) -> None:
    """To the options of ``plan`` and ``estimate``."""
    group = parser.add_argument_group("adapters", "with the first, what training low-rank adapters takes (LoRA, QLoRA)")
    group.add_argument("--lora", type=int, metavar="RANK", help="adapters of this rank beside the model's frozen matrices")
    group.add_argument(
        "--lora-targets",
        nargs="+",
        default=[],
        metavar="MODULE",
        help="modules that get adapters, such as q_proj v_proj; every matrix in the blocks unless given",
    )


def read_adapter(options: argparse.Namespace) -> Adapter | None:
    """None where none are asked for. Raises InvalidInput where the options contradict each other."""
    if options.lora is None:
        if options.lora_targets:
            raise InvalidInput(
                f"--lora-targets {' '.join(options.lora_targets)} names modules for adapters that nothing asks for; add --lora "
                "with their rank",
                field="lora_targets",
                value=options.lora_targets,
            )
        return None
    if options.profile:
        raise InvalidInput(
            f"--profile {options.profile} is of training every weight; to train adapters name the --model",
            field="profile",
            value=str(options.profile),
        )
    return Adapter(rank=options.lora, targets=tuple(options.lora_targets))


def pack_frozen(weights: WeightsPlan, options: argparse.Namespace) -> WeightsPlan:
    """With the frozen matrices held as ``--pack`` says. Raises InvalidInput where every weight is trained."""
    if options.pack != "same" and options.lora is None:
        raise InvalidInput(
            f"--pack {options.pack} is of frozen matrices, and here every weight is trained; add --lora, or ask about generating",
            field="pack",
            value=options.pack,
            allowed=["same"],
        )
    return replace(weights, frozen=options.pack)
