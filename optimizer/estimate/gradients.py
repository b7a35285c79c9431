"""What gradients cost beside the backward pass that makes them: clipping to a global norm."""

from optimizer.hardware.machine import Rates
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Profile


def estimate_clip_bytes(num_tensors: int, plan: WeightsPlan) -> int:
    """Scratch of the global norm: one fp32 norm per tensor, and the same again stacked."""
    return 2 * num_tensors * 4


def estimate_clip_ms(profile: Profile, plan: WeightsPlan, rates: Rates, *, scales: bool) -> float:
    """One read for the norm; one read and one write where gradients are scaled."""
    num_passes = 3 if scales else 1
    num_tensors = len(profile.tensors.in_order())
    moved_bytes = num_passes * profile.num_parameters * plan.bytes_per_element
    return (moved_bytes / rates.memory_bytes_per_s + (num_passes - 1) * num_tensors * rates.op_overhead_s) * 1000
