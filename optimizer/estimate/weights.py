"""What weights cost: every trained parameter once in the plan's dtype, frozen ones as they are held, and the buffers."""

from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Profile


def estimate_weight_bytes(profile: Profile, plan: WeightsPlan) -> int:
    """Bytes on the device, at every moment."""
    trained_bytes = profile.num_parameters * plan.bytes_per_element
    frozen_bytes = profile.total_frozen_bytes(plan.representation)
    return trained_bytes + frozen_bytes + profile.buffer_bytes["fp32" if plan.dtype == "fp32" else "bf16"]
