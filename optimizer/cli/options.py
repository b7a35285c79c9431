"""Options that the planning commands share: those that name a model, work, a machine and a goal, and how they are read."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final, get_args

from optimizer.api.inputs import BEST, is_there, read_json
from optimizer.base.errors import InvalidInput
from optimizer.base.threads import sleep_while_waiting
from optimizer.base.units import format_bytes, parse_bytes
from optimizer.cli.adapters import read_adapter
from optimizer.goal import UNLIMITED_BYTES, Goal, Loss, Objective
from optimizer.hardware.devices import ASSUMED_DISK_BYTES, ASSUMED_HOST_MEMORY_BYTES, Beside
from optimizer.hardware.joined import cards_of, read_links
from optimizer.hardware.machine import Machine
from optimizer.hardware.mixed import read_kinds
from optimizer.hardware.peers import PEER_KINDS, SeveralDevices, with_devices
from optimizer.optimizers import OPTIMIZERS
from optimizer.plan.pins.training import Pins
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.search.answer.baselines import BASELINES
from optimizer.workload import TrainingWorkload


def add_model_options(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", metavar="CONFIG_OR_PRESET", help="config.json, its folder, or a preset's name")
    source.add_argument("--profile", metavar="FILE", type=Path, help="what `profile` wrote; no torch is needed then")


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    length, batch = TrainingWorkload.sequence_length, TrainingWorkload.global_batch_size
    parser.add_argument("--sequence-length", type=int, default=length, metavar="TOKENS", help=f"default: {length}")
    parser.add_argument("--batch", type=int, default=batch, metavar="SEQUENCES", help=f"in an optimizer step (default: {batch})")
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
        choices=list(OPTIMIZERS),
        default=TrainingWorkload.optimizer,
        help=", ".join(f"{name} keeps {declared.keeps}" for name, declared in OPTIMIZERS.items()),
    )
    parser.add_argument("--momentum", type=float, default=TrainingWorkload.momentum, help="of sgd; 0 for none")


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    machine = parser.add_mutually_exclusive_group()
    machine.add_argument("--gpu", metavar="NAME", help="a card of the built-in table, such as 'RTX 4090'")
    machine.add_argument("--machine", metavar="FILE", type=Path, help="what `probe --json` wrote")
    parser.add_argument(
        "--host-memory",
        metavar="SIZE",
        help=f"of the machine that a card of the table is in; {format_bytes(ASSUMED_HOST_MEMORY_BYTES)} unless given",
    )
    parser.add_argument(
        "--disk",
        metavar="SIZE",
        help="free on that machine's scratch disk, taken for an NVMe drive; "
        f"{format_bytes(ASSUMED_DISK_BYTES)} unless given, 0 for none",
    )


_OF_TABLE_ALONE: Final = {
    "host_memory_bytes": ("host-memory", "Cap it with --host-budget, or name a card."),
    "disk_bytes": ("disk", "Cap it with --disk-budget, or name a card."),
    "cards_per_switch": ("cards-per-switch", "Leave it out, or name the cards."),
}
"""Options by what they say of the machine around a card, and what to do where that was measured."""


def add_devices_options(parser: argparse.ArgumentParser) -> None:
    """Options of commands that plan for several devices."""
    parser.add_argument(
        "--devices",
        metavar="NUMBER",
        help="of which a plan may use all: 2 beside --gpu, '2x RTX 4090' by itself, several kinds: '2x RTX 3060, RTX 4090', or, "
        "with --link, of several machines: '2x RTX 4090, RTX 3060@office'",
    )
    parser.add_argument(
        "--link",
        metavar="MACHINE=RATE,DELAY",
        action="append",
        default=[],
        help="from a machine that --devices names to all others, such as office=100Mbit,20ms (half of what ping says); "
        "may be given several times, and the slowest counts",
    )
    parser.add_argument(
        "--peer-link",
        metavar="LINK",
        help=f"between cards of one machine: {', '.join(PEER_KINDS)}, bytes per second, or a network's rate and delay "
        "such as 200Mbit,20ms; the best that such cards can have unless given",
    )
    parser.add_argument(
        "--cards-per-switch",
        metavar="NUMBER",
        type=int,
        help="of the table that share one PCIe link to the host behind a switch (nvidia-smi topo -m: PIX or PXB between them); "
        "1 up to four cards and 2 for more unless given",
    )


def read_workload(options: argparse.Namespace) -> TrainingWorkload:
    return TrainingWorkload(
        sequence_length=options.sequence_length,
        global_batch_size=options.batch,
        num_steps=options.steps,
        max_grad_norm=options.max_grad_norm or None,
        optimizer=options.optimizer,
        momentum=options.momentum,
        adapter=read_adapter(options),
    )


def read_goal(options: argparse.Namespace, machine: Machine | None, *, pins: Pins | None = None) -> Goal:
    """``forbid`` and ``objective`` where the command has them. Without a machine, as much as any has."""
    objective: Objective = getattr(options, "objective", "fastest_step")
    budget_bytes, host_budget_bytes, disk_budget_bytes = _read_budgets(options)
    whole_bytes = UNLIMITED_BYTES if machine is None else max(kind.device.memory_bytes for kind in machine.kinds)
    return Goal(
        device_budget_bytes=whole_bytes if budget_bytes is None else budget_bytes,
        host_budget_bytes=host_budget_bytes,
        disk_budget_bytes=disk_budget_bytes,
        allow_lossy=bool(options.allow_lossy),
        most_loss=options.allow_lossy if options.allow_lossy in get_args(Loss) else "any",
        forbid=tuple(getattr(options, "forbid", ())),
        pins=pins or Pins(),
        objective=objective,
        num_devices=_count_devices(options),
    )


def _read_devices(options: argparse.Namespace) -> tuple[SeveralDevices, ...]:
    """The devices of a command that plans for several, by kind; one of others."""
    text = getattr(options, "devices", None)
    return (SeveralDevices(name="", count=1),) if text is None else read_kinds(text)


def _read_budgets(options: argparse.Namespace) -> list[int | None]:
    """Bytes of the device, the host and the disk; None for those without a budget."""
    names = ("budget", "host-budget", "disk-budget")
    return [_parse_size(name, getattr(options, name.replace("-", "_"), None)) for name in names]


def _parse_size(name: str, text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise InvalidInput(f"--{name}: {error}", field=name, value=text, allowed="a size such as 6 GiB") from error


def read_machine(options: argparse.Namespace) -> Machine:
    """Raises InvalidInput also for a host or a disk beside a machine that was measured, which has its own."""
    beside = read_beside(options)
    # A wrong size is refused before half a minute of measuring.
    _read_budgets(options)
    devices = _read_devices(options)
    names = ", ".join(kind.name for kind in devices)
    if names and (options.gpu is not None or options.machine):
        raise InvalidInput(
            f"--devices names a card ({names}) and so does --gpu or --machine; give --devices a number",
            field="devices",
            value=options.devices,
            allowed="a number",
        )
    links = read_links(getattr(options, "link", ()))
    if options.gpu is not None or names:
        kinds = devices if names else (SeveralDevices(name=options.gpu, count=devices[0].count),)
        return cards_of(kinds, links=links, peer_link=getattr(options, "peer_link", None), **beside)
    if links:
        raise InvalidInput(
            f"--link {options.link[0]} joins machines, but --devices names no cards; write --devices 'RTX 4090, RTX 3060@office'",
            field="link",
            value=options.link,
            allowed="--link beside --devices with the cards of several machines",
        )
    for name in beside:
        flag, hint = _OF_TABLE_ALONE[name]
        raise InvalidInput(
            f"--{flag} says what is beside a card of the table (--gpu, --gpus); a measured machine has its own",
            field=flag,
            value=getattr(options, flag.replace("-", "_")),
            hint=hint,
        )
    if options.machine:
        return _with_devices(Machine.from_json(read_json(options.machine, field="machine")), options)
    sleep_while_waiting()
    from optimizer.hardware.probe.probe import probe_machine

    print("measuring this machine ...", file=sys.stderr)
    return _with_devices(probe_machine(), options)


def _count_devices(options: argparse.Namespace) -> int:
    return sum(kind.count for kind in _read_devices(options))


def _with_devices(machine: Machine, options: argparse.Namespace) -> Machine:
    """A measured machine with the devices that were asked for, unless it has as many."""
    num_devices, link = _count_devices(options), getattr(options, "peer_link", None)
    if num_devices <= machine.num_devices and link is None:
        return machine
    return with_devices(machine, max(num_devices, machine.num_devices), peer_link=link)


def read_beside(options: argparse.Namespace) -> Beside:
    """The host, the disk and the way to them that a card of the table is given."""
    found: Beside = {}
    cards_per_switch = getattr(options, "cards_per_switch", None)
    if cards_per_switch is not None:
        found["cards_per_switch"] = cards_per_switch
    host_memory_bytes, disk_bytes = _parse_size("host-memory", options.host_memory), _parse_size("disk", options.disk)
    if host_memory_bytes is not None:
        found["host_memory_bytes"] = host_memory_bytes
    if disk_bytes is not None:
        found["disk_bytes"] = disk_bytes
    return found


def read_profile(path: Path) -> Profile:
    return Profile.from_json(read_json(path, field="profile"))


def read_plan(name: str | None) -> str | Plan | None:
    if name is None or name == BEST or name in BASELINES:
        return name
    if not is_there(Path(name)):
        allowed = [BEST, *BASELINES]
        raise InvalidInput(
            f"plan {name!r} is neither a file nor one of {', '.join(allowed)}", field="plan", value=name, allowed=allowed
        )
    document = read_json(Path(name), field="plan")
    chosen = document.get("chosen", document) if isinstance(document, dict) else document
    return Plan.from_json(chosen.get("plan", chosen) if isinstance(chosen, dict) else chosen)


def write_json(path: Path, document: Any) -> None:
    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}", field="output", value=str(path)) from error


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


def print_answer(answer: Any) -> None:
    """A text as it is, anything else as JSON."""
    if isinstance(answer, str):
        print(answer)
    else:
        print_json(answer)
