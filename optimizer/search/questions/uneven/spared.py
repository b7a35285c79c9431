"""Room that devices of several kinds and their hosts leave for what attempts were short of (``estimate/job/shortfalls.py``)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from optimizer.estimate.job.shortfalls import Shortfall, shortfall_on
from optimizer.estimate.prediction import Prediction
from optimizer.goal import Goal
from optimizer.hardware.machine import Machine
from optimizer.hardware.share import count_sharing
from optimizer.search.budgeted import budgets_elsewhere


def spared_by_kind(machine: Machine, shortfalls: Iterable[Shortfall]) -> dict[str, int]:
    """By kind of device that ran out, the bytes that each of its devices leaves free, in all stages."""
    found: dict[str, int] = {}
    for each in shortfalls:
        for kind in machine.kinds:
            name = kind.device.name
            if each.tier == "device" and each.device in ("", name):
                found[name] = max(found.get(name, 0), each.num_bytes)
    return found


def with_less_elsewhere(goal: Goal, machine: Machine, shown: Iterable[tuple[int, Sequence[Shortfall]]]) -> Goal:
    """The goal with smaller budgets of host and disk, which are of all ranks together. shown: by attempt, its number of ranks,
    and what each of them was short of.
    """
    host_bytes = disk_bytes = 0
    for num_ranks, shortfalls in shown:
        num_sharing = count_sharing(machine, num_ranks=num_ranks)
        host_bytes = max(host_bytes, num_sharing * shortfall_on("host", shortfalls))
        disk_bytes = max(disk_bytes, num_sharing * shortfall_on("disk", shortfalls))
    if not host_bytes and not disk_bytes:
        return goal
    has = budgets_elsewhere(machine, host_bytes=goal.host_budget_bytes, disk_bytes=goal.disk_budget_bytes)
    return replace(
        goal,
        host_budget_bytes=max(0, has["host_budget_bytes"] - host_bytes),
        disk_budget_bytes=max(0, has["disk_budget_bytes"] - disk_bytes),
    )


def raise_ranks(prediction: Prediction, spared_bytes: Mapping[str, int]) -> Prediction:
    """The prediction with what its ranks' devices leave free on top of their peaks."""
    ranks = tuple(
        replace(rank, peak_high_bytes=rank.peak_high_bytes + spared_bytes.get(rank.device, 0)) for rank in prediction.ranks
    )
    return prediction.changed(ranks=ranks) if ranks != prediction.ranks else prediction
