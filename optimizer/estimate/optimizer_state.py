"""What the optimizer's state costs in bytes on every tier; what its update needs for a moment, moves, and takes in time.

Follows ``runtime/optimizer_state.py`` for what stays on the device and ``runtime/host_update.py`` for what leaves it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from optimizer.categories import Link
from optimizer.estimate.activations import ASSUMED_DISK_BYTES_PER_S, assumed_rate
from optimizer.estimate.moments import TABLES_BYTES, Moments
from optimizer.estimate.tensors import TensorList
from optimizer.estimate.weights import is_streamed
from optimizer.hardware.machine import Rates
from optimizer.plan.optimizer_state import MIN_8BIT_ELEMENTS, split_state
from optimizer.plan.plan import Plan
from optimizer.profile.trained import TensorSize
from optimizer.workload import TrainingWorkload

ASSUMED_HOST_ELEMENTS_PER_S = 2e8
"""AdamW on a host whose rate was not measured: a desktop's memory, read and written at 28 bytes an element."""
UPDATE_BYTES_PER_ELEMENT = {2: 28, 1: 20, 0: 12}
"""Moved by an update of fp32, by the moments there are: weight, gradient and moments read, all but the gradient written."""
_RATE_NAMES = {2: "adamw_32", 1: "sgd_momentum", 0: "sgd"}
"""In ``Rates.optimizer_elements_per_s``."""
_PIECE_ELEMENTS = 1 << 20
"""What an update on the host works on at once (``runtime/homes.py``)."""
_NUM_SLOTS = 2
_FP32_BYTES = 4


def estimate_state_bytes(tensors: Sequence[TensorSize], plan: Plan, *, num_moments: int) -> int:
    """On the device, of these tensors: what lives between steps, fp32 master weights of bf16 training included."""
    moments = Moments(bits=plan.optimizer_state.bits, num=num_moments)
    return estimate_early_state_bytes(tensors, plan) + sum(moments.of(tensor.num_elements) for tensor in tensors)


def estimate_early_state_bytes(tensors: Sequence[TensorSize], plan: Plan) -> int:
    """Of these bytes what is there before the first update: fp32 master weights, the tables of 8-bit state."""
    master_bytes = _FP32_BYTES * sum(t.num_elements for t in tensors) if plan.weights.dtype != "fp32" else 0
    has_tables = plan.optimizer_state.bits == 8 and any(t.num_elements >= MIN_8BIT_ELEMENTS for t in tensors)
    return master_bytes + (TABLES_BYTES if has_tables else 0)


UpdateChange = tuple[int, int, int]
"""Bytes of ``(temporaries, gradients, optimizer_state)`` that come or go on the device."""


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
    list_changes: Callable[[], Sequence[UpdateChange]] = tuple

    @cached_property
    def changes(self) -> tuple[UpdateChange, ...]:
        """On the device during the update, in order."""
        return tuple(self.list_changes())


def estimate_state(
    tensors: TensorList, plan: Plan, *, workload: TrainingWorkload, device_kind: str = "cuda"
) -> StateCosts:
    num_moments = workload.num_moments
    leaves = split_state(plan.optimizer_state, tensors.num_elements)
    staying = list_staying(tensors, plan)
    num_staying = sum(size.num_elements for size in staying)
    costs = StateCosts(
        device_bytes=estimate_state_bytes(staying, plan, num_moments=num_moments),
        num_staying=num_staying,
        list_changes=partial(list_update_changes, staying, plan, device_kind=device_kind),
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


def list_staying(tensors: TensorList, plan: Plan) -> list[TensorSize]:
    """Those whose state is on the device."""
    leaves = split_state(plan.optimizer_state, tensors.num_elements)
    return [size for size, is_away in zip(tensors.sizes, leaves, strict=True) if not is_away]


def list_update_changes(
    tensors: Sequence[TensorSize], plan: Plan, *, first_moments: Moments | None = None, device_kind: str = "cuda"
) -> list[UpdateChange]:
    """During the update of state on the device, in order. first_moments: those that it makes, in the first step.
    device_kind: on the CPU an update in 8 bits holds copies while it runs.

    Kept gradients: fp32 weights need nothing. Those below are stepped one by one: a fp32 copy of the gradient comes, the
    gradient goes, then the copy. Gradients on the host come back one by one, and go before the copy does.
    """
    is_below = plan.weights.dtype != "fp32"
    size = plan.weights.bytes_per_element
    if plan.gradients.choice == "consume":
        return []
    # Not the first moments' number: only AdamW, which has two, keeps 8 bits.
    moments = Moments(bits=plan.optimizer_state.bits, num=2)

    def update(num_elements: int) -> list[UpdateChange]:
        made = [(0, 0, first_moments.of(num_elements))] if first_moments else []
        scratch_bytes = moments.scratch_of(num_elements, device_kind=device_kind)
        return [*made, (scratch_bytes, 0, 0), (-scratch_bytes, 0, 0)] if scratch_bytes else made

    fetches = plan.gradients.choice == "host"
    in_order = list(tensors)
    if not fetches:
        in_order = [*(t for t in tensors if t.is_matrix), *(t for t in tensors if not t.is_matrix)]
    if plan.gradients.choice == "keep" and not is_below:
        return [change for tensor in in_order for change in update(tensor.num_elements)]
    changes: list[UpdateChange] = []
    for tensor in in_order:
        n = tensor.num_elements
        if fetches:
            changes.append((0, size * n, 0))
        if is_below:
            changes += [(_FP32_BYTES * n, 0, 0), (0, -size * n, 0), *update(n), (-_FP32_BYTES * n, 0, 0)]
        else:
            changes += [*update(n), (0, -size * n, 0)]
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
    held = {"host": Moments(bits=32, num=num_moments).counter_bytes * len(leaving), "disk": 0}
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
    rate = rates.host_optimizer_elements_per_s or assumed_rate(ASSUMED_HOST_ELEMENTS_PER_S, rates, kind="host")
    return _as_fast_as_adamw(rate, num_moments)


def _as_fast_as_adamw(elements_per_s: float, num_moments: int) -> float:
    return elements_per_s * UPDATE_BYTES_PER_ELEMENT[2] / UPDATE_BYTES_PER_ELEMENT[num_moments]


def host_bytes_per_s(rates: Rates) -> float:
    """What the host's memory gives simple loops: as much as updates move."""
    return UPDATE_BYTES_PER_ELEMENT[2] * host_elements_per_s(rates)


def disk_read_ms(num_bytes: int, rates: Rates) -> float:
    assumed = assumed_rate(ASSUMED_DISK_BYTES_PER_S, rates, kind="disk")
    return num_bytes / (rates.disk_read_bytes_per_s or assumed) * 1000


def disk_write_ms(num_bytes: int, rates: Rates) -> float:
    assumed = assumed_rate(ASSUMED_DISK_BYTES_PER_S, rates, kind="disk")
    return num_bytes / (rates.disk_write_bytes_per_s or assumed) * 1000
