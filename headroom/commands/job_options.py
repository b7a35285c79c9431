"""The options of ``headroom submit``: a training job from a YAML file, from options alone, or from both, options first."""

import argparse
import time
from pathlib import Path
from typing import Any

from headroom.client import HeadroomClient, Row
from headroom.client.types import Machine
from headroom.commands.submit import UsageError, read_job_file
from optimizer.base.units import format_bytes, parse_bytes

RECIPES = ("lora", "qlora", "preference", "full", "exact")
MIRRORS = ("wandb", "mlflow")
_WORKLOAD = {
    "steps": "num_steps",
    "epochs": "num_epochs",
    "sequence_length": "sequence_length",
    "batch": "global_batch_size",
    "learning_rate": "learning_rate",
    "seed": "seed",
}
"""Options by the field of the workload that they set."""
_SPEC = ("model", "dataset", "recipe", "name", "mirrors", "machines", "link")
"""Options that are fields of the spec."""
REGISTERED_WITHIN_S = 120.0
_GOAL = {
    "budget": "device_budget_bytes",
    "host_budget": "host_budget_bytes",
    "disk_budget": "disk_budget_bytes",
    "devices": "num_devices",
}
"""The same of the goal."""


def add_submit_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, nargs="?", metavar="JOB.yaml", help="a job's fields; options below override them")
    parser.add_argument("--model", help="id or name of a model, or a folder to add")
    parser.add_argument("--dataset", help="id or name of a dataset, or a file to upload")
    parser.add_argument("--recipe", choices=RECIPES, help="default without a file: lora for a model with weights, else exact")
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps")
    parser.add_argument("--epochs", type=float, metavar="X", help="passes over the data, in place of --steps")
    parser.add_argument("--sequence-length", type=int, metavar="N", help="tokens in a sequence")
    parser.add_argument("--batch", type=int, metavar="N", help="sequences in an optimizer step")
    parser.add_argument("--learning-rate", type=float, metavar="X", help="highest learning rate (default: the recipe's)")
    parser.add_argument("--seed", type=int, metavar="N", help="of first weights and the order of the data")
    parser.add_argument("--budget", type=size, metavar="SIZE", help="memory of each device (default: all of the largest machine)")
    parser.add_argument("--host-budget", type=size, metavar="SIZE", help="host memory (default: what is free)")
    parser.add_argument("--disk-budget", type=size, metavar="SIZE", help="room on the disk (default: what is free)")
    parser.add_argument("--devices", type=int, metavar="N", help="devices, at most (default: 1, or all of --machines)")
    parser.add_argument("--machines", type=_names, metavar="A,B", help="machines that share the job, over --link")
    parser.add_argument("--link", metavar="LINK", help="the network between --machines, as 1Gbit,1ms; else as measured")
    parser.add_argument("--name", help="a name for the job")
    add_mirror_option(parser)


def add_mirror_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mirror", dest="mirrors", action="append", choices=MIRRORS, help="copy the measurements there; may be given twice"
    )


def job_from_options(options: argparse.Namespace) -> Row:
    """The spec, as far as it is known without asking the service. Raises UsageError where it names no model or dataset."""
    spec = read_job_file(options.file) if options.file is not None else {}
    spec |= {name: getattr(options, name) for name in _SPEC if getattr(options, name)}
    for name in ("model", "dataset"):
        if not spec.get(name):
            raise UsageError(f"no {name} is given", hint=f"Name a job file that has one, or give --{name}.")
    workload = {field: getattr(options, name) for name, field in _WORKLOAD.items() if getattr(options, name) is not None}
    goal = {field: getattr(options, name) for name, field in _GOAL.items() if getattr(options, name) is not None}
    spec["workload"] = _over(spec.get("workload"), workload)
    spec["goal"] = _over(spec.get("goal"), goal)
    return spec


def complete_job(client: HeadroomClient, spec: Row) -> Row:
    """A spec that was made of options alone, with what it leaves out: LoRA for a model with weights, else exact training, and
    the memory of the largest machine's device. Raises UsageError where there is no machine.
    """
    row = next((row for row in client.models() if spec["model"] in (row["id"], row["name"])), None)
    recipe = spec.get("recipe") or ("lora" if row is not None and row["has_weights"] else "exact")
    goal = spec["goal"]
    budget_bytes = goal.get("device_budget_bytes") or largest_device_bytes(client, num_devices=goal.get("num_devices", 1))
    return {**spec, "recipe": recipe, "goal": {**goal, "device_budget_bytes": budget_bytes}}


def largest_device_bytes(client: HeadroomClient, *, num_devices: int = 1, wait_s: float = REGISTERED_WITHIN_S) -> int:
    """Memory of the largest machine's device, where so many share a job. Waits for one to register, since a worker that was just
    started measures its own first; raises UsageError if none does.
    """
    give_up_at = time.monotonic() + wait_s
    while not (sizes := [_device_bytes(machine, num_devices) for machine in client.machines()]):
        if time.monotonic() > give_up_at:
            raise UsageError("no machine has registered yet", hint="Start a worker, or give --budget.")
        time.sleep(1)
    return max(sizes)


def _device_bytes(machine: Machine, num_devices: int) -> int:
    """Memory of the largest device. Those that the CPU plays share its memory, unless each was given bytes of its own."""
    first = machine["device"]
    memory_bytes = max(int(device["memory_bytes"]) for device in (first, *(kind["device"] for kind in machine.get("others", []))))
    if num_devices > 1 and first["kind"] == "cpu" and not first.get("is_capped"):
        return memory_bytes // num_devices
    return memory_bytes


def size(text: str) -> int:
    """Bytes of an option such as ``12 GiB``."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def summary_of(spec: Row) -> str:
    """A line on what was chosen for the user: recipe and budget."""
    budget = spec["goal"].get("device_budget_bytes")
    return f"recipe {spec['recipe']}, device memory at most {format_bytes(int(budget))}"


def _names(text: str) -> list[str]:
    """The names in ``home,office``; the service says what is wrong with them."""
    return [name.strip() for name in text.split(",")]


def _over(given: Any, more: Row) -> Any:
    return {**(given or {}), **more} if given is None or isinstance(given, dict) else given
