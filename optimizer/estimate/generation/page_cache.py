"""Finds generations whose files on the disk stay in the system's page cache, and so are read at memory's pace. Torch-free.

Each step reads all of it, in turn. So what has room in memory beside what the plan keeps on the host is read from the disk once,
if ever; of what has not, little is still there when it is read again, and all of it is priced at the disk's own rate.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from optimizer.estimate.generation.kv.cache import KvCosts, sum_homes
from optimizer.hardware.machine import Machine
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.passes.arrange import PassShape
from optimizer.profile.generation import GenerationProfile

_IN_MEMORY: Final = ("host", "disk")


def reading_disk(machine: Machine, *, is_in_memory: bool) -> Machine:
    """The machine with its rate of the disk as the plan reads it."""
    return replace(machine, rates=machine.rates.with_page_cache) if is_in_memory else machine


def is_disk_in_memory(
    profile: GenerationProfile, plan: GenerationPlan, machine: Machine, *, passes: Sequence[PassShape] = ()
) -> bool:
    """True where the page cache holds the files of all passes; without passes, where it may hold them."""
    away_bytes = _weights_bytes(profile, plan) + _cache_bytes(profile, plan, machine, passes=passes)
    return away_bytes <= machine.host_memory_bytes


def _weights_bytes(profile: GenerationProfile, plan: GenerationPlan) -> int:
    held = profile.weight_bytes(plan.weights.representation)
    return sum(held.by_block[kind] for kind in profile.block_kinds) if plan.weights.place in _IN_MEMORY else 0


def _cache_bytes(profile: GenerationProfile, plan: GenerationPlan, machine: Machine, *, passes: Sequence[PassShape]) -> int:
    if plan.kv_cache.place not in _IN_MEMORY:
        return 0
    costs = {
        shape: KvCosts(profile, plan, machine, shape=shape)
        for shape in {shape for micro_batches in passes for shape in micro_batches}
    }
    return sum_homes([[costs[shape].homes for shape in micro_batches] for micro_batches in passes])
