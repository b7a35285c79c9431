"""Separates products that find their weights in the processor's caches from those that read memory. Torch-free."""

from dataclasses import replace
from typing import Final

from optimizer.base.units import MIB
from optimizer.hardware.machine import Machine
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.generation import GenerationProfile

_USUAL_CACHE_BYTES: Final = 32 * MIB
"""Size of a processor's cache that is assumed where the processor does not report it."""
_OWN_SHARE: Final = 0.5
"""Share of the cache that weights have, beside activations, keys and values, and whatever else runs on the processor."""


def reading_weights(machine: Machine, *, are_cold: bool) -> Machine:
    """The machine with its curves of products as these weights are read."""
    return replace(machine, rates=machine.rates.with_cold_weights) if are_cold else machine


def are_weights_cold(profile: GenerationProfile, plan: WeightsPlan, machine: Machine) -> bool:
    """True where weights come from memory each time, on the CPU device; for CUDA there is one curve for all.

    What stays is read once a step, so from memory where all of it together is more than the cache. What is copied to its place
    just before, or unpacked there, is in the cache still, where a block's copy and its home fit it.
    """
    held = profile.weight_bytes(plan.representation)
    by_block = [held.by_block[kind] for kind in profile.block_kinds]
    read_bytes = held.outside + sum(by_block) if plan.frozen == "same" else 0
    if plan.place != "device":
        read_bytes = 2 * max(by_block)
    is_more = read_bytes > _OWN_SHARE * (machine.rates.cache_bytes or _USUAL_CACHE_BYTES)
    return is_more and machine.device.kind == "cpu"
