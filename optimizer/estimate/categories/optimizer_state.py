"""Bytes of the optimizer's state on every tier; bytes that its update needs for a moment and moves, and its time.

Follows ``runtime/step/optimizer_state.py`` for what stays on the device and ``runtime/step/host_update.py`` for what leaves it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from optimizer.base.categories import Link
from optimizer.estimate.categories.stores import STORE_LANES, STORE_LINKS, assumed_rate
from optimizer.estimate.categories.tensors import TensorList
from optimizer.estimate.categories.weights import is_streamed
from optimizer.estimate.memo import Table
from optimizer.estimate.tasks.moments import TABLES_BYTES, Moments, TensorUpdate, moments_of, tensor_update
from optimizer.hardware.devices import ASSUMED_CHANNELS, ASSUMED_UPDATES_PER_CHANNEL
from optimizer.hardware.rates import Rates
from optimizer.optimizers import ADAMW, KeptState, UpdateRate
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.optimizer_state import MIN_8BIT_ELEMENTS, OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan, rounding_scratch_bytes
from optimizer.profile.trained import TensorSize
from optimizer.workload import TrainingWorkload

ASSUMED_HOST_ELEMENTS_PER_S = ASSUMED_CHANNELS[0][1] * ASSUMED_UPDATES_PER_CHANNEL
"""AdamW on a host whose rate was not measured: a desktop's."""
_PIECE_ELEMENTS = 1 << 20
"""Elements that an update on the host works on at once (``runtime/tiers/homes.py``)."""
_NUM_SLOTS = 2
_FP32_BYTES = 4
_CONVERTED_BYTES = 12
"""Bytes per element below fp32: its gradient read and widened, its new weight read and narrowed."""
_ROUNDED_BYTES = 40
"""Bytes per element that is rounded at random: the weight widened (6), 16 random bits (2), three passes over the copy
(26), and it narrowed (6). A processor draws bits more slowly than it moves them: there an update takes longer than this
says."""
_COSTS: Final[Table[tuple[OptimizerStatePlan, WeightsPlan, GradientsPlan, bool, KeptState, str], "StateCosts"]] = Table()


def estimate_state_bytes(tensors: Sequence[TensorSize], plan: Plan, *, kept: KeptState) -> int:
    """Bytes on the device, of these tensors, of what lives between steps, fp32 master weights of bf16 training included."""
    moments = moments_of(tensors, bits=plan.optimizer_state.bits, kept=kept)
    sizes = Counter(tensor.num_elements for tensor in tensors)
    return estimate_early_state_bytes(tensors, plan) + sum(count * moments.num_bytes(size) for size, count in sizes.items())


def estimate_early_state_bytes(tensors: Sequence[TensorSize], plan: Plan) -> int:
    """Bytes of state that are there before the first update: fp32 master weights, the tables of 8-bit state."""
    master_bytes = plan.weights.master_bytes_per_element * sum(t.num_elements for t in tensors)
    has_tables = plan.optimizer_state.bits == 8 and any(t.num_elements >= MIN_8BIT_ELEMENTS for t in tensors)
    return master_bytes + (TABLES_BYTES if has_tables else 0)


Rows = NDArray[np.int64]
"""Bytes that come or go on the device, in order, as [change, (temporaries, gradients, optimizer state)]."""


@dataclass(frozen=True, kw_only=True)
class StateCosts:
    """The optimizer's state under one plan."""

    device_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0
    remote_bytes: int = 0
    copied_bytes: dict[Link, int] = field(default_factory=dict)
    """Bytes that the updates of one step copy, by link."""
    num_staying: int
    """Elements whose state is on the device."""
    num_tensors_staying: int
    leaving_by_block: dict[int, int] = field(default_factory=dict)
    """Elements whose update runs on the host, by block (``TensorList``), in the order of their updates."""
    list_changes: Callable[[], Rows] = lambda: as_rows([])

    @cached_property
    def changes(self) -> Rows:
        """Changes of bytes on the device during the update."""
        return self.list_changes()


def estimate_state(
    tensors: TensorList, plan: Plan, *, workload: TrainingWorkload, device_kind: str = "cuda"
) -> StateCosts:
    """The costs of a plan's optimizer state, made once for all shapes."""
    kept, trains_all = workload.kept_state, workload.adapter is None
    key = (plan.optimizer_state, plan.weights, plan.gradients, trains_all, kept, device_kind)
    return _COSTS.obtain(
        tensors, key, lambda: _estimate(tensors, plan, kept=kept, trains_all=trains_all, device_kind=device_kind)
    )


def _estimate(
    tensors: TensorList, plan: Plan, *, kept: KeptState, trains_all: bool, device_kind: str
) -> StateCosts:
    staying = tensors.list_staying(plan.optimizer_state)
    num_staying = sum(size.num_elements for size in staying)
    costs = StateCosts(
        device_bytes=estimate_state_bytes(staying, plan, kept=kept),
        num_staying=num_staying,
        num_tensors_staying=len(staying),
        list_changes=partial(
            list_update_changes,
            staying,
            plan,
            moments_of(tensors.sizes, bits=plan.optimizer_state.bits, kept=kept),
            device_kind=device_kind,
        ),
    )
    if plan.optimizer_state.place != "device" and len(staying) < len(tensors.sizes):
        costs = _with_leaving_state(costs, tensors, plan, kept=kept, trains_all=trains_all)
    return _with_fetched_gradients(costs, plan)


def list_update_changes(
    tensors: Sequence[TensorSize], plan: Plan, moments: Moments, *, is_first: bool = False, device_kind: str = "cuda"
) -> Rows:
    """During the update of state on the device. is_first: whether it makes the moments.

    Kept gradients: fp32 weights need nothing. Those below are stepped one by one: a fp32 copy of the gradient comes, the
    gradient goes, then the copy. Gradients on the host come back one by one, and go before the copy does.
    """
    if plan.gradients.choice == "consume":
        return as_rows([])
    in_order = list(tensors)
    if plan.gradients.choice == "keep":
        in_order = [*(t for t in tensors if t.is_matrix), *(t for t in tensors if not t.is_matrix)]
    sizes = [tensor.num_elements for tensor in in_order]
    update = tensor_update(plan.gradients, plan.weights, moments, is_first=is_first, device_kind=device_kind)
    fetched_bytes = update.gradient_bytes if plan.gradients.choice == "host" else 0
    rows = {size: as_rows(_list_rows(update, size, fetched_bytes=fetched_bytes * size)) for size in set(sizes)}
    return np.concatenate([as_rows([]), *map(rows.__getitem__, sizes)])


def as_rows(changes: Sequence[tuple[int, int, int]]) -> Rows:
    return np.array(changes, dtype=np.int64).reshape(-1, 3)


_COLUMNS = {"copies": 0, "scratch": 0, "gradients": 1, "optimizer_state": 2}
"""The column of ``Rows`` in which each kind of change is counted."""


def _list_rows(update: TensorUpdate, num_elements: int, *, fetched_bytes: int) -> list[tuple[int, int, int]]:
    """List the changes of one tensor's update. fetched_bytes: of its gradient, where that comes back for the update."""
    changes = [("gradients", fetched_bytes)] if fetched_bytes else []
    rows = []
    for what, num_bytes in [*changes, *update.list_changes(num_elements)]:
        row = [0, 0, 0]
        row[_COLUMNS[what]] = num_bytes
        rows.append((row[0], row[1], row[2]))
    return rows


def _with_fetched_gradients(costs: StateCosts, plan: Plan) -> StateCosts:
    """Gradients on the host of tensors whose state is on the device are copied back for their update."""
    num_bytes = costs.num_staying * plan.weights.bytes_per_element
    if plan.gradients.choice != "host" or not num_bytes:
        return costs
    copied = dict(costs.copied_bytes)
    copied["host_to_device"] = copied.get("host_to_device", 0) + num_bytes
    return replace(costs, copied_bytes=copied)


def _with_leaving_state(costs: StateCosts, tensors: TensorList, plan: Plan, *, kept: KeptState, trains_all: bool) -> StateCosts:
    size, master_size = plan.weights.bytes_per_element, plan.weights.updated_bytes_per_element
    moments_size = _FP32_BYTES * kept.num_moments
    place, home = plan.optimizer_state.place, plan.weights.place
    streams = is_streamed(tensors, plan.weights, trains_all=trains_all)
    leaves = tensors.list_leaving(plan.optimizer_state)
    by_block: dict[int, int] = {}
    elements = {True: 0, False: 0}
    """Elements of weights that stream, and of those that do not."""
    num_leaving, largest = 0, 0
    for num_elements, block, is_home, is_away in zip(tensors.num_elements, tensors.blocks, streams, leaves, strict=True):
        if is_away:
            by_block[block] = by_block.get(block, 0) + num_elements
            elements[is_home] += num_elements
            num_leaving, largest = num_leaving + 1, max(largest, num_elements)
    held = {"host": Moments(bits=32, kept=kept).counter_bytes * num_leaving, "disk": 0, "remote": 0}
    copied: list[tuple[Link, int]] = []
    stored_bytes = dict.fromkeys(STORE_LINKS, 0)
    stored_masters = False
    for is_home, num_elements in elements.items():
        if not num_elements:
            continue
        # A weight at home is its own master where both have one dtype.
        has_own_master = master_size != size or not is_home
        held[place] += num_elements * (moments_size + master_size * has_own_master)
        master_place = place if has_own_master else home
        stored_masters |= master_place in STORE_LANES
        for store in stored_bytes:
            stored_bytes[store] += num_elements * (master_size * (master_place == store) + moments_size * (place == store))
        if not is_home:
            copied.append(("host_to_device", size * num_elements))
        elif has_own_master and home in STORE_LINKS:
            copied.append((STORE_LINKS[home][0], size * num_elements))
    copied += [(link, num_bytes) for store, num_bytes in stored_bytes.items() for link in STORE_LINKS[store]]
    num_piece = min(_PIECE_ELEMENTS, largest)
    converts = master_size != size and (elements[False] > 0 or home in STORE_LANES)
    slot_size = master_size * stored_masters + moments_size * (place in STORE_LANES) + size * converts
    held["host"] += num_piece * (_NUM_SLOTS * slot_size + _FP32_BYTES * plan.weights.widens_updates)
    held["host"] += Moments(bits=32, kept=kept).copy_of(num_piece)
    if plan.weights.master == "none":
        held["host"] += _FP32_BYTES * num_piece + rounding_scratch_bytes(num_piece)
    return replace(
        costs,
        host_bytes=held["host"],
        disk_bytes=held["disk"],
        remote_bytes=held["remote"],
        copied_bytes=_sum_by_link(copied),
        leaving_by_block=by_block,
    )


def _sum_by_link(copied: Iterable[tuple[Link, int]]) -> dict[Link, int]:
    """Bytes by link; links that nothing moves over are left out."""
    total: dict[Link, int] = {}
    for link, num_bytes in copied:
        if num_bytes:
            total[link] = total.get(link, 0) + num_bytes
    return total


def estimate_update_ms(num_elements: int, plan: Plan, rates: Rates, *, kept: KeptState = ADAMW) -> float:
    """Time to update state on the device. Kernels that were not measured are taken to move their bytes as fast as 32-bit
    AdamW does; 8-bit ones to take its time.
    """
    measured = rates.optimizer_elements_per_s
    name: UpdateRate = "adamw_8" if plan.optimizer_state.bits == 8 else kept.rate_name
    rate = measured.get(name) or _as_fast_as_adamw(measured["adamw_32"], kept)
    rounding_s = _rounding_s(plan, ADAMW.update_bytes * measured["adamw_32"])
    return num_elements * (1 / rate + rounding_s) * 1000


def _rounding_s(plan: Plan, bytes_per_s: float) -> float:
    """Seconds of an element that is rounded at random, by what the memory of its update gives."""
    return _ROUNDED_BYTES / bytes_per_s if plan.weights.master == "none" else 0.0


def host_elements_per_s(rates: Rates, *, kept: KeptState = ADAMW) -> float:
    """Updates of state that left."""
    rate = rates.host_optimizer_elements_per_s or assumed_rate(ASSUMED_HOST_ELEMENTS_PER_S, rates, kind="host")
    return _as_fast_as_adamw(rate, kept)


def host_update_s(plan: Plan, rates: Rates, *, kept: KeptState, clips: bool) -> float:
    """Seconds of one element whose state left: its gradient scaled where gradients are clipped, converted below fp32,
    and the update.
    """
    scaled_bytes = 2 * plan.weights.bytes_per_element if clips else 0
    converted_bytes = _CONVERTED_BYTES if plan.weights.widens_updates else 0
    moved_s = (scaled_bytes + converted_bytes) / host_bytes_per_s(rates)
    return 1 / host_elements_per_s(rates, kept=kept) + moved_s + _rounding_s(plan, host_bytes_per_s(rates))


def _as_fast_as_adamw(elements_per_s: float, kept: KeptState) -> float:
    return elements_per_s * ADAMW.update_bytes / kept.update_bytes


def host_bytes_per_s(rates: Rates) -> float:
    """Rate that the host's memory gives simple loops: as much as updates move."""
    return ADAMW.update_bytes * host_elements_per_s(rates)
