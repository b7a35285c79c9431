"""What weights cost: every parameter once in the plan's dtype, and the buffers (rotary tables)."""

from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Profile


def estimate_weight_bytes(profile: Profile, plan: WeightsPlan) -> int:
    """Bytes on the device, at every moment."""
    return profile.num_parameters * plan.bytes_per_element + profile.buffer_bytes["fp32" if plan.dtype == "fp32" else "bf16"]
