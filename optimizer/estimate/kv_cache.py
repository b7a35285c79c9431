"""What the cache of keys and values costs: exact by the model's heads and windows, the batch, and the tokens it has room for."""

from optimizer.plan.inference import InferencePlan
from optimizer.profile.inference import InferenceProfile


def list_kv_bytes(
    profile: InferenceProfile, plan: InferencePlan, *, batch_size: int, num_tokens: int
) -> tuple[int, ...]:
    """By block, of a pass of so many sequences with room for so many tokens each."""
    size = batch_size * plan.weights.bytes_per_element
    by_kind = [size * tensors.num_elements(num_tokens) for tensors in profile.kv]
    return tuple(by_kind[kind] for kind in profile.block_kinds)
