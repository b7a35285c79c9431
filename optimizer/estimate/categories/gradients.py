"""Costs of gradients beside the backward pass that makes them: where they go, and clipping to a global norm.

Follows ``runtime/step/gradients.py``: gradients on the host have a buffer each, for good, and staging where micro-batches are
added up; consumed ones are gone before the next op runs. Sparse ones (``runtime/step/sparse_gradients.py``) are bounded
from above, because how many rows a batch touches depends on its tokens.
"""

from dataclasses import dataclass

from optimizer.base.categories import CATEGORIES
from optimizer.estimate.categories.tensors import TensorList
from optimizer.estimate.tasks.dropped import Dropped
from optimizer.estimate.tasks.moments import Moments, tensor_update
from optimizer.hardware.rates import Rates
from optimizer.plan.plan import Plan

_SLOT = {name: index for index, name in enumerate(CATEGORIES)}
_GRADIENTS, _TEMPORARIES, _STATE = _SLOT["gradients"], _SLOT["temporaries"], _SLOT["optimizer_state"]
_NORM_BYTES = 4
_SCALAR_BYTES = 4
_FP32_BYTES = 4
_INDEX_BYTES = 8
_OPS_OF_ONE = 4
"""Ops on a gradient on the host: copied there, scaled, used for the update, and it or the new weight copied back."""
_NUM_STAGING = {"cpu": 1, "cuda": 2}
"""Buffers of later micro-batches (``runtime/step/gradients.py``, NUM_STAGING): a thread adds on CUDA."""


@dataclass(frozen=True, kw_only=True)
class GradientBytes:
    """Bytes that the gradients row holds on each tier between steps."""

    device: int = 0
    host: int = 0


def find_dropped(plan: Plan, moments: Moments, *, is_first: bool, device_kind: str) -> Dropped | None:
    """Decide the fate of each gradient in the part that completes it; None where it stays.

    is_first: whether its update there makes the moments.
    """
    if plan.gradients.choice == "keep":
        return None
    if plan.gradients.choice == "host":
        return Dropped()
    return Dropped(update=tensor_update(plan.gradients, plan.weights, moments, is_first=is_first, device_kind=device_kind))


def estimate_gradient_bytes(tensors: TensorList, plan: Plan, *, device_kind: str) -> GradientBytes:
    """Bytes that gradients hold as long as the run."""
    norms_bytes = _NORM_BYTES * len(tensors.sizes)
    if plan.gradients.choice == "consume":
        return GradientBytes(device=norms_bytes)
    if plan.gradients.choice == "keep":
        return GradientBytes()
    size = plan.weights.bytes_per_element
    adds_up = plan.batch.accumulation_steps > 1 and not plan.layout.keeps_streamed
    num_staging = _NUM_STAGING[device_kind] if adds_up else 0
    staging_bytes = num_staging * max(tensors.num_elements, default=0) * size
    return GradientBytes(host=tensors.total_elements * size + staging_bytes + norms_bytes)


def estimate_clip_bytes(tensors: TensorList, plan: Plan, *, clips: bool, num_shared: int = 0) -> int:
    """Scratch of the global norm, where the gradients are. Kept ones: a fp32 norm per tensor, and the same again stacked; then
    a few numbers.

    num_shared: tensors whose norms ranks exchange, 0 on one device; each makes a row of all of them, by which the stack goes.
    """
    num_scalars = 4 if clips else 2
    norms_bytes = _NORM_BYTES * len(tensors.sizes) if plan.gradients.choice == "keep" else 0
    shared_bytes, scalars_bytes = _NORM_BYTES * num_shared, num_scalars * _SCALAR_BYTES
    if not num_shared:
        return 2 * norms_bytes + scalars_bytes
    return norms_bytes + shared_bytes + max(norms_bytes, scalars_bytes)


def estimate_rows_bytes(tensors: TensorList, *, num_tokens: int) -> int:
    """Upper bound of what embeddings' sparse gradients hold for so many tokens: a row and its int64 index for each."""
    return sum(num_tokens * (_FP32_BYTES * size.row_elements + _INDEX_BYTES) for size in tensors.sparse)


def estimate_rows_update_bytes(tensors: TensorList, *, num_tokens: int) -> int:
    """Upper bound of the scratch of their update, one table after the other: weights and two moments of the rows touched."""
    touched = (min(size.num_elements, num_tokens * size.row_elements) for size in tensors.sparse)
    return 3 * _FP32_BYTES * max(touched, default=0)


def estimate_clipped_bytes(plan: Plan) -> int:
    """Bytes that clipping leaves where the gradients are until the update is done: the norm, and the factor that fp16 gradients
    are still to be multiplied by.
    """
    return _SCALAR_BYTES * (2 if plan.weights.dtype == "fp16" else 1)


def gradient_python_s(rates: Rates) -> float:
    """Seconds of Python between two ops on a gradient that is on the host."""
    return rates.python_work_s("gradients") / _OPS_OF_ONE


def estimate_clip_ms(tensors: TensorList, plan: Plan, rates: Rates, *, scales: bool) -> float:
    """Time of clipping on the device: one read for the norm; one read and one write where gradients are scaled."""
    if plan.gradients.choice == "host":
        return 0.0
    num_passes = 3 if scales else 1
    moved_bytes = num_passes * tensors.total_elements * plan.weights.bytes_per_element
    return (moved_bytes / rates.memory_bytes_per_s + (num_passes - 1) * len(tensors.sizes) * rates.op_overhead_s) * 1000


def estimate_fetched_scaling_ms(num_elements: int, plan: Plan, rates: Rates) -> float:
    """Time to scale gradients that come back from the host to be used: one read and one write on the device, of fp16 ones
    when wide.
    """
    size = _FP32_BYTES if plan.weights.dtype == "fp16" else plan.weights.bytes_per_element
    return 2 * size * num_elements / rates.memory_bytes_per_s * 1000


