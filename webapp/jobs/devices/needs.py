"""Works out what each rank of a plan needs on its device."""

from collections.abc import Mapping
from typing import Any

from optimizer.base.serialize import from_json
from optimizer.estimate.sharing import device_need_bytes
from optimizer.hardware.machine import Device
from webapp.jobs.devices.named import RankNeed


def needs_of(
    plan: Mapping[str, Any] | None,
    prediction: Mapping[str, Any] | None,
    *,
    machine: Mapping[str, Any],
    budget_bytes: int | None,
) -> list[RankNeed]:
    """In the order of the ranks; none where the plan names no devices. machine: its document."""
    shares = ((plan or {}).get("layout") or {}).get("ranks") or []
    found = (prediction or {}).get("ranks") or []
    if not shares or len(shares) != len(found):
        return []
    kinds = [machine["device"], *(kind["device"] for kind in machine.get("others") or [])]
    devices = {kind["name"]: from_json(Device, kind, path="machine.device") for kind in kinds}
    needs = []
    for rank in found:
        device = devices[rank["device"]]
        budgets = [size for size in (budget_bytes, device.memory_bytes) if size is not None]
        own = {"device_peak_high_bytes": rank["peak_high_bytes"], "memory": rank.get("memory")}
        needs.append(RankNeed(device.name, device_need_bytes(own, budget_bytes=min(budgets), device=device)))
    return needs
