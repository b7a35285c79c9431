"""A rank's part of the work and the machine, kept for each machine: prices of hundreds of plans ask for it. Torch-free."""

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Final

from optimizer.base.errors import InvalidInput, InvalidPlan
from optimizer.estimate.categories.network import Network
from optimizer.hardware.machine import Machine
from optimizer.hardware.share import share_of
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.workload import TrainingWorkload


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """A rank's part of a workload and of a machine; both whole on one device."""

    workload: TrainingWorkload
    machine: Machine
    network: Network | None
    """None on one device."""


_shared: Final[dict[tuple[int, int, int], tuple[Machine, Network | None]]] = {}


def find_part(workload: TrainingWorkload, machine: Machine, layout: DeviceLayout) -> RankPart:
    """The part of each rank of a layout. Raises InvalidPlan for more cards than the machine has, InvalidWorkload where sequences
    cannot be dealt out.
    """
    if layout.num_devices == 1:
        return RankPart(workload=workload, machine=machine, network=None)
    check_devices(machine, layout)
    key = (id(machine), layout.num_devices, layout.replicas)
    if key not in _shared:
        _shared[key] = share_of(machine, num_ranks=layout.num_devices), Network.of(machine, layout)
        weakref.finalize(machine, _shared.pop, key, None)
    shared, network = _shared[key]
    return RankPart(workload=workload.of_rank(layout.num_parts), machine=shared, network=network)


def find_stage_parts(workload: TrainingWorkload, machine: Machine, layout: DeviceLayout) -> tuple[RankPart, ...]:
    """The part of each stage of a model that is cut, in order; on unequal devices each on its own kind. Raises as ``find_part``
    does.
    """
    if not layout.ranks:
        return (find_part(workload, machine, layout),) * layout.num_devices
    return tuple(find_part(workload, each, layout.without_ranks) for each in list_machines(machine, layout))


def list_machines(machine: Machine, layout: DeviceLayout) -> tuple[Machine, ...]:
    """For each of ranks that differ, the machine as if all of them were on its kind of device. Raises InvalidPlan for devices
    that the machine does not have, or not as many.
    """
    _check_kinds(machine, layout)
    inside = machine.among({share.device for share in layout.ranks})
    known = {share.device: inside.with_kind(share.device, num_devices=layout.num_devices) for share in layout.ranks}
    return tuple(known[share.device] for share in layout.ranks)


def _check_kinds(machine: Machine, layout: DeviceLayout) -> None:
    """On the CPU device any number of processes play devices."""
    asked: Counter[str] = Counter()
    for rank, share in enumerate(layout.ranks):
        try:
            kind = machine.with_kind(share.device)
        except InvalidInput as error:
            raise InvalidPlan(
                f"plan.layout.ranks[{rank}]: {error.message}",
                field="plan.layout.ranks",
                value=share.device,
                allowed=error.fields.get("allowed"),
            ) from error
        asked[kind.device.name] += 1
        if machine.device.kind == "cuda" and asked[kind.device.name] > kind.num_devices:
            raise InvalidPlan(
                f"plan.layout.ranks asks for {asked[kind.device.name]} or more of {kind.device.name}; "
                f"the machine has {kind.num_devices}",
                field="plan.layout.ranks",
                value=asked[kind.device.name],
                allowed={"minimum": 1, "maximum": kind.num_devices},
            )


def check_devices(machine: Machine, layout: DeviceLayout) -> None:
    """Raise InvalidPlan for more cards than the machine has. On the CPU device any number of processes play devices."""
    if machine.device.kind == "cpu" or layout.num_devices <= machine.num_devices:
        return
    raise InvalidPlan(
        f"plan.layout.num_devices is {layout.num_devices}; the machine has {machine.num_devices}",
        field="plan.layout.num_devices",
        value=layout.num_devices,
        allowed={"minimum": 1, "maximum": machine.num_devices},
    )
