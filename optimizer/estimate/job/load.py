"""Peaks while a model that is trained is read from files: a walk over its tensors, each as ``categories/reading.py`` has it.
Torch-free.

Homes that ranks share are there from the start, and written by rank 0, whose load this is. Of weights that are dealt out to ranks
each reads what it keeps, by way of the host.
"""

from collections.abc import Iterator

from optimizer.estimate.categories.reading import Level, Reading, TierPeaks, Way, file_dtype
from optimizer.estimate.categories.weights import estimate_home_bytes, list_kept
from optimizer.estimate.step.simulate import Resident
from optimizer.hardware.machine import Machine
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.profile.trained import BaseSize, BaseSizes
from optimizer.workload import TrainingWorkload


def estimate_load(
    profile: Profile, *, plan: Plan, workload: TrainingWorkload, machine: Machine, loaded: Resident, rank: int = 0
) -> TierPeaks | None:
    """None where a profile does not know the tensors. loaded: bytes that are there once it has ended. rank: of ranks that deal
    weights out.
    """
    base = profile.base
    if base is None:
        return None
    adapter_bytes = profile.num_parameters * plan.weights.bytes_per_element if workload.adapter is not None else 0
    trains_all = workload.adapter is None
    reading = Reading(
        weights=plan.weights,
        file_dtype=file_dtype(profile.weights_dtype),
        packs=not trains_all and plan.weights.frozen != "same",
        on_cuda=machine.device.kind == "cuda",
        has_homes=plan.shares_homes(trains_all=trains_all),
    )
    level = Level(
        device=adapter_bytes + profile.buffer_bytes["fp32" if plan.weights.dtype == "fp32" else "bf16"],
        host=estimate_home_bytes(profile, plan, trains_all=trains_all, rank=0)["host"] if reading.has_homes else 0,
    )
    for way, size in _list_read(profile, base, plan, trains_all=trains_all, rank=rank):
        reading.read(level, size, way)
    # The optimizer's part of what stays comes after the weights.
    level.reach_in_all(int(loaded.device.sum()), loaded.host)
    return level.peaks(disk_bytes=loaded.disk)


def _list_read(
    profile: Profile, base: BaseSizes, plan: Plan, *, trains_all: bool, rank: int
) -> Iterator[tuple[Way, BaseSize]]:
    """The tensors that a rank reads, with the way of each."""
    kinds = profile.tensors.block_kinds
    if plan.layout.is_cut:
        own = plan.layout.rank_stages[rank]
        inside: Way = "through the host" if plan.weights.place == "device" else "to the host"
        yield from ((inside, size) for block in own.blocks for size in base.by_block[kinds[block]])
        outside = [*(base.before if own.is_first else ()), *(base.after if own.is_last else ())]
        yield from (("through the host", size) for size in outside)
        return
    comes: Way = "through the host" if plan.weights.place == "device" else "to the host"
    is_kept = iter(list_kept(profile, plan, trains_all=trains_all, rank=rank)) if plan.layout.shares_weights else iter(())
    later: list[BaseSize] = []
    for in_block, size in base.in_order(kinds):
        if not in_block or not plan.brings_weights:
            yield "to the device", size
        elif not plan.layout.shares_weights or next(is_kept, True):
            later.append(size)
    # What comes and goes is left for whoever makes its home.
    yield from ((comes, size) for size in later)
