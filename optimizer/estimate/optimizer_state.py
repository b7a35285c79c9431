"""What the optimizer's state costs in bytes on every tier; what its update needs for a moment, moves, and takes in time.

Follows ``runtime/optimizer_state.py`` for what stays on the device and ``runtime/host_update.py`` for what leaves it.
Source of the 8-bit layout: bitsandbytes (``optim/optimizer.py``): one byte per element and moment, one fp32 scale per
256 elements and moment, tensors under 4096 elements in 32 bits, two shared tables of 256 fp32 values.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from optimizer.categories import Link
from optimizer.estimate.activations import ASSUMED_DISK_BYTES_PER_S
from optimizer.estimate.compiled import TensorList
from optimizer.estimate.weights import is_streamed
from optimizer.hardware.machine import Rates
from optimizer.plan.optimizer_state import QUANTIZATION_BLOCK_ELEMENTS, split_state
from optimizer.plan.plan import Plan
from optimizer.profile.profile import TensorSize
from optimizer.workload import TrainingWorkload

MIN_8BIT_ELEMENTS = 4096
ASSUMED_HOST_ELEMENTS_PER_S = 2e8
"""AdamW on a host whose rate was not measured: a desktop's memory, read and written at 28 bytes an element."""
UPDATE_BYTES_PER_ELEMENT = {2: 28, 1: 20, 0: 12}
"""Moved by an update of fp32, by the moments there are: weight, gradient and moments read, all but the gradient written."""
_RATE_NAMES = {2: "adamw_32", 1: "sgd_momentum", 0: "sgd"}
"""In ``Rates.optimizer_elements_per_s``."""
_TABLES_BYTES = 2 * 256 * 4
_STEP_COUNTER_BYTES = 4
"""torch's fused AdamW counts steps in one fp32 scalar per tensor."""
_PIECE_ELEMENTS = 1 << 20
"""What an update on the host works on at once (``runtime/homes.py``)."""
_NUM_SLOTS = 2
_FP32_BYTES = 4


def estimate_state_bytes(tensors: Sequence[TensorSize], plan: Plan, *, num_moments: int) -> int:
    """On the device, of these tensors: what lives between steps, fp32 master weights of bf16 training included."""
    num_elements = sum(tensor.num_elements for tensor in tensors)
    master_bytes = _FP32_BYTES * num_elements if plan.weights.dtype != "fp32" else 0
    if plan.optimizer_state.bits == 32:
        return master_bytes + _FP32_BYTES * num_moments * num_elements + _counter_bytes(num_moments) * len(tensors)
    moments = [_moment_bytes(tensor.num_elements) for tensor in tensors]
    is_any_8bit = any(tensor.num_elements >= MIN_8BIT_ELEMENTS for tensor in tensors)
    return master_bytes + sum(moments) + (_TABLES_BYTES if is_any_8bit else 0)


def _counter_bytes(num_moments: int) -> int:
    """Of each tensor: only AdamW, which alone has two moments, counts its steps."""
    return _STEP_COUNTER_BYTES if num_moments == 2 else 0


def _moment_bytes(num_elements: int) -> int:
    if num_elements < MIN_8BIT_ELEMENTS:
        return 8 * num_elements
    return 2 * (num_elements + 4 * -(-num_elements // QUANTIZATION_BLOCK_ELEMENTS))


@dataclass(frozen=True, kw_only=True)
class StateCosts:
    """The optimizer's state under one plan."""

    device_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0
    copied_bytes: dict[Link, int] = field(default_factory=dict)
    """By the updates of one step."""
    num_staying: int
    """Elements whose state is on the device."""
    leaving_by_block: dict[int, int] = field(default_factory=dict)
    """Elements whose update runs on the host, by block (``TensorList``), in the order of their updates."""
    changes: tuple[tuple[int, int], ...] = ()
    """Of ``(temporaries, gradients)`` bytes on the device during the update, in order."""


def estimate_state(tensors: TensorList, plan: Plan, *, workload: TrainingWorkload) -> StateCosts:
    num_moments = workload.num_moments
    leaves = split_state(plan.optimizer_state, tensors.num_elements)
    staying = [size for size, is_away in zip(tensors.sizes, leaves, strict=True) if not is_away]
    num_staying = sum(size.num_elements for size in staying)
    costs = StateCosts(
        device_bytes=estimate_state_bytes(staying, plan, num_moments=num_moments),
        num_staying=num_staying,
        changes=tuple(list_update_changes(staying, plan)),
    )
    if not any(leaves):
        return _with_fetched_gradients(costs, plan)
    streams = is_streamed(tensors, plan.weights, trains_all=workload.adapter is None)
    leaving = [
        (size.num_elements, block, streamed)
        for size, block, streamed, is_away in zip(tensors.sizes, tensors.blocks, streams, leaves, strict=True)
        if is_away
    ]
    return _with_fetched_gradients(_away(costs, leaving, plan, num_moments=num_moments), plan)


def list_update_changes(tensors: Sequence[TensorSize], plan: Plan) -> list[tuple[int, int]]:
    """During the update of state on the device, in order: changes of ``(temporaries, gradients)`` bytes.

    Kept gradients: fp32 weights need nothing. Those below are stepped one by one: a fp32 copy of the gradient comes, the
    gradient goes, then the copy. Gradients on the host come back one by one, and go before the copy does.
    """
    is_below = plan.weights.dtype != "fp32"
    size = plan.weights.bytes_per_element
    if plan.gradients.choice == "consume" or (plan.gradients.choice == "keep" and not is_below):
        return []
    fetches = plan.gradients.choice == "host"
    in_order = list(tensors)
    if not fetches:
        in_order = [*(t for t in tensors if t.is_matrix), *(t for t in tensors if not t.is_matrix)]
    changes: list[tuple[int, int]] = []
    for tensor in in_order:
        n = tensor.num_elements
        if fetches:
            changes.append((0, size * n))
        if is_below:
            changes += [(_FP32_BYTES * n, 0), (0, -size * n), (-_FP32_BYTES * n, 0)]
        else:
            changes.append((0, -size * n))
    return changes


def _with_fetched_gradients(costs: StateCosts, plan: Plan) -> StateCosts:
    """Gradients on the host of tensors whose state is on the device are copied back for their update."""
    num_bytes = costs.num_staying * plan.weights.bytes_per_element
    if plan.gradients.choice != "host" or not num_bytes:
        return costs
    copied = dict(costs.copied_bytes)
    copied["host_to_device"] = copied.get("host_to_device", 0) + num_bytes
    return replace(costs, copied_bytes=copied)


def _away(
    costs: StateCosts, leaving: Sequence[tuple[int, int, bool]], plan: Plan, *, num_moments: int
) -> StateCosts:
    """leaving: elements, block, and whether the weight itself streams."""
    is_below = plan.weights.dtype != "fp32"
    size = plan.weights.bytes_per_element
    place, home = plan.optimizer_state.place, plan.weights.place
    held = {"host": _counter_bytes(num_moments) * len(leaving), "disk": 0}
    copied: dict[Link, int] = {}
    stored_elements = 0
    stored_masters = False
    by_block: dict[int, int] = {}
    for num_elements, block, streams in leaving:
        by_block[block] = by_block.get(block, 0) + num_elements
        has_own_master = is_below or not streams
        held[place] += _FP32_BYTES * num_elements * (num_moments + has_own_master)
        is_master_stored = (place if has_own_master else home) == "disk"
        stored_masters |= is_master_stored
        stored_elements += num_elements * (is_master_stored + num_moments * (place == "disk"))
        if not streams:
            _add(copied, "host_to_device", size * num_elements)
        elif is_below and home == "disk":
            _add(copied, "host_to_disk", size * num_elements)
    for link in ("disk_to_host", "host_to_disk"):
        _add(copied, link, _FP32_BYTES * stored_elements)
    num_piece = min(_PIECE_ELEMENTS, max(num_elements for num_elements, _, _ in leaving))
    num_stored_parts = stored_masters + num_moments * (place == "disk")
    converts = is_below and any(not streams or home == "disk" for _, _, streams in leaving)
    slot_bytes = num_piece * (_FP32_BYTES * num_stored_parts + size * converts)
    held["host"] += _NUM_SLOTS * slot_bytes + _FP32_BYTES * num_piece * is_below
    return replace(
        costs,
        host_bytes=held["host"],
        disk_bytes=held["disk"],
        copied_bytes=copied,
        leaving_by_block=by_block,
    )


def _add(copied: dict[Link, int], link: Link, num_bytes: int) -> None:
    if num_bytes:
        copied[link] = copied.get(link, 0) + num_bytes


def estimate_update_ms(num_elements: int, plan: Plan, rates: Rates, *, num_moments: int = 2) -> float:
    """Of state on the device. Kernels that were not measured are taken to move their bytes as fast as 32-bit AdamW does; 8-bit
    ones to take its time.
    """
    measured = rates.optimizer_elements_per_s
    name = "adamw_8" if plan.optimizer_state.bits == 8 else _RATE_NAMES[num_moments]
    rate = measured.get(name) or _as_fast_as_adamw(measured["adamw_32"], num_moments)
    return num_elements / rate * 1000


def host_elements_per_s(rates: Rates, *, num_moments: int = 2) -> float:
    """Updates of state that left."""
    return _as_fast_as_adamw(rates.host_optimizer_elements_per_s or ASSUMED_HOST_ELEMENTS_PER_S, num_moments)


def _as_fast_as_adamw(elements_per_s: float, num_moments: int) -> float:
    return elements_per_s * UPDATE_BYTES_PER_ELEMENT[2] / UPDATE_BYTES_PER_ELEMENT[num_moments]


def host_bytes_per_s(rates: Rates) -> float:
    """What the host's memory gives simple loops: as much as updates move."""
    return UPDATE_BYTES_PER_ELEMENT[2] * host_elements_per_s(rates)


def disk_read_ms(num_bytes: int, rates: Rates) -> float:
    return num_bytes / (rates.disk_read_bytes_per_s or ASSUMED_DISK_BYTES_PER_S) * 1000


def disk_write_ms(num_bytes: int, rates: Rates) -> float:
    return num_bytes / (rates.disk_write_bytes_per_s or ASSUMED_DISK_BYTES_PER_S) * 1000
