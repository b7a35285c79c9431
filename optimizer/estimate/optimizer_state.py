"""What AdamW's state costs in bytes, what its update needs for a moment, and how long it takes.

Source of the 8-bit layout: bitsandbytes (``optim/optimizer.py``): one byte per element and moment, one fp32 scale per
256 elements
and moment, tensors under 4096 elements in 32 bits, two shared tables of 256 fp32 values.
"""

from collections.abc import Sequence

from optimizer.hardware.machine import Rates
from optimizer.plan.optimizer_state import QUANTIZATION_BLOCK_ELEMENTS
from optimizer.plan.plan import Plan
from optimizer.profile.profile import TensorSize

MIN_8BIT_ELEMENTS = 4096
_TABLES_BYTES = 2 * 256 * 4
_STEP_COUNTER_BYTES = 4
"""torch's fused AdamW counts steps in one fp32 scalar per tensor."""


def estimate_state_bytes(tensors: Sequence[TensorSize], plan: Plan) -> int:
    """Bytes that live between steps, fp32 master weights of bf16 training included."""
    num_elements = sum(tensor.num_elements for tensor in tensors)
    master_bytes = 4 * num_elements if plan.weights.dtype != "fp32" else 0
    if plan.optimizer_state.bits == 32:
        return master_bytes + 8 * num_elements + _STEP_COUNTER_BYTES * len(tensors)
    moments = [_moment_bytes(tensor.num_elements) for tensor in tensors]
    is_any_8bit = any(tensor.num_elements >= MIN_8BIT_ELEMENTS for tensor in tensors)
    return master_bytes + sum(moments) + (_TABLES_BYTES if is_any_8bit else 0)


def _moment_bytes(num_elements: int) -> int:
    if num_elements < MIN_8BIT_ELEMENTS:
        return 8 * num_elements
    return 2 * (num_elements + 4 * -(-num_elements // QUANTIZATION_BLOCK_ELEMENTS))


def list_update_changes(tensors: Sequence[TensorSize], plan: Plan) -> list[tuple[int, int]]:
    """During the update, in order: changes of ``(temporaries, gradients)`` bytes.

    fp32 weights need nothing. bf16 weights are stepped one by one: a fp32 copy of the gradient comes, the gradient
    goes, then the copy.
    """
    if plan.weights.dtype == "fp32":
        return []
    changes: list[tuple[int, int]] = []
    for tensor in [*(t for t in tensors if t.is_matrix), *(t for t in tensors if not t.is_matrix)]:
        changes.append((4 * tensor.num_elements, 0))
        changes.append((-4 * tensor.num_elements, -2 * tensor.num_elements))
    return changes


def estimate_update_ms(num_parameters: int, plan: Plan, rates: Rates) -> float:
    rate = rates.optimizer_elements_per_s.get(f"adamw_{plan.optimizer_state.bits}")
    if rate is None:
        # No 8-bit kernel was measured: the 32-bit rate is the nearest known.
        rate = rates.optimizer_elements_per_s["adamw_32"]
    return num_parameters / rate * 1000
