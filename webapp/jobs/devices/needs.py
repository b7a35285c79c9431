"""Works out what each rank of a plan needs on its device."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from optimizer.base.errors import InvalidPlan
from optimizer.base.serialize import from_json
from optimizer.estimate.sharing import device_need_bytes
from optimizer.hardware.machine import Device
from webapp.jobs.devices.named import AT, RankNeed


def needs_of(
    plan: Mapping[str, Any] | None,
    prediction: Mapping[str, Any] | None,
    *,
    machine: Mapping[str, Any],
    budget_bytes: int | None,
) -> list[RankNeed]:
    """In the order of the ranks; none where the plan names no devices. machine: its document."""
    shares = _shares(plan)
    found = (prediction or {}).get("ranks") or []
    if not shares or len(shares) != len(found):
        return []
    devices = _devices(machine)
    return [
        RankNeed(rank["device"], _need_bytes(rank, devices[rank["device"]], budget_bytes=budget_bytes)) for rank in found
    ]


def joined_needs_of(
    plan: Mapping[str, Any] | None,
    prediction: Mapping[str, Any] | None,
    *,
    machines: Mapping[str, Mapping[str, Any]],
    budget_bytes: int | None,
) -> list[RankNeed]:
    """The same of a plan over several machines, whose ranks each name a device and its machine.

    machines: the documents by name. Raises InvalidPlan for a rank that names none of them.
    """
    shares = _shares(plan)
    found = (prediction or {}).get("ranks") or [None] * len(shares)
    devices: dict[str, Device] = {}
    for machine, document in machines.items():
        devices |= {f"{name}{AT}{machine}": device for name, device in _devices(document).items()}
    needs = []
    for index, (share, predicted) in enumerate(zip(shares, found, strict=True)):
        device = devices.get(share.get("device", ""))
        if device is None:
            raise _unknown_device(index, share.get("device", ""), allowed=list(devices))
        machine = share["device"].rpartition(AT)[2]
        needs.append(RankNeed(device.name, _need_bytes(predicted, device, budget_bytes=budget_bytes), machine))
    return needs


def _shares(plan: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    return ((plan or {}).get("layout") or {}).get("ranks") or []


def _devices(machine: Mapping[str, Any]) -> dict[str, Device]:
    """A machine's kinds of device by name."""
    return {device.name: device for device in _kinds(machine)}


def _kinds(machine: Mapping[str, Any]) -> Iterator[Device]:
    for kind in (machine["device"], *(other["device"] for other in machine.get("others") or [])):
        yield from_json(Device, kind, path="machine.device")


def _need_bytes(predicted: Mapping[str, Any] | None, device: Device, *, budget_bytes: int | None) -> int:
    """predicted: of this rank; without it the budget counts."""
    budgets = [size for size in (budget_bytes, device.memory_bytes) if size is not None]
    own = {"device_peak_high_bytes": predicted["peak_high_bytes"], "memory": predicted.get("memory")} if predicted else None
    return device_need_bytes(own, budget_bytes=min(budgets), device=device)


def _unknown_device(rank: int, name: str, *, allowed: list[str]) -> InvalidPlan:
    field = f"plan.layout.ranks[{rank}].device"
    return InvalidPlan(
        f"{field} is {name!r:.80}; allowed on these machines: {', '.join(allowed)}",
        field=field,
        value=name[:80],
        allowed=allowed,
        hint="Plan again: a machine was measured anew since.",
    )
