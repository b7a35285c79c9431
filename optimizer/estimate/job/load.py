"""Peaks while a model is read from files, tensor by tensor to its place, as ``runtime/layers/filling.py`` does. Torch-free.

A tensor that the CPU device keeps as the file has it is read where it stays. Any other is on the host as the file has it
while it is brought to the device, converted or packed; one that streams is converted or packed on the host and written to
its home. Homes that ranks share are there from the start, and written by rank 0, whose load this is. Of weights that are dealt
out to ranks each reads what it keeps, by way of the host.

*Not modelled*: a checkpoint that is packed already, of which a matrix is on the host in fp32; what bitsandbytes holds
inside.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from optimizer.estimate.categories.weights import estimate_home_bytes, list_kept, packed_bytes
from optimizer.estimate.step.simulate import Resident
from optimizer.formats.transfer_sizes import PIECE_ELEMENTS
from optimizer.hardware.machine import Machine
from optimizer.plan.plan import Plan
from optimizer.plan.weights import PACKED_SIZES
from optimizer.profile.profile import Profile
from optimizer.profile.trained import BaseSize, BaseSizes
from optimizer.workload import TrainingWorkload

_Way = Literal["to the device", "through the host", "to the host"]
_FILE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class TierPeaks:
    """Most bytes on each tier."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int = 0
    together_bytes: int = 0
    """Most on device and host at once: what a process holds where the processor is the device."""


def estimate_load(
    profile: Profile, *, plan: Plan, workload: TrainingWorkload, machine: Machine, loaded: Resident, rank: int = 0
) -> TierPeaks | None:
    """None where a profile does not know the tensors. loaded: bytes that are there once it has ended. rank: of ranks that deal
    weights out.
    """
    base = profile.base
    if base is None:
        return None
    adapter_bytes = profile.num_parameters * plan.weights.bytes_per_element if workload.adapter is not None else 0
    level = _Level(device=adapter_bytes + profile.buffer_bytes["fp32" if plan.weights.dtype == "fp32" else "bf16"])
    file_bytes = _FILE_BYTES.get(profile.weights_dtype, 4)
    trains_all = workload.adapter is None
    has_homes = plan.shares_homes(trains_all=trains_all)
    if has_homes:
        level.host = estimate_home_bytes(profile, plan, trains_all=trains_all, rank=0)["host"]
    for way, size in _list_read(profile, base, plan, trains_all=trains_all, rank=rank):
        packs = size.packs and plan.weights.frozen != "same" and workload.adapter is not None
        on_cuda = machine.device.kind == "cuda"
        _read(
            level, size, plan, file_bytes=file_bytes, way=way, packs=packs, on_cuda=on_cuda, has_homes=has_homes
        )
    # The optimizer's part of what stays comes after the weights.
    level.reach(int(loaded.device.sum()), loaded.host)
    return TierPeaks(
        device_bytes=level.device_peak,
        host_bytes=level.host_peak,
        disk_bytes=loaded.disk,
        together_bytes=level.together_peak,
    )


def _list_read(
    profile: Profile, base: BaseSizes, plan: Plan, *, trains_all: bool, rank: int
) -> Iterator[tuple[_Way, BaseSize]]:
    """The tensors that a rank reads, with the way of each."""
    kinds = profile.tensors.block_kinds
    if plan.layout.is_cut:
        own = plan.layout.rank_stages[rank]
        inside: _Way = "through the host" if plan.weights.place == "device" else "to the host"
        yield from ((inside, size) for block in own.blocks for size in base.by_block[kinds[block]])
        outside = [*(base.before if own.is_first else ()), *(base.after if own.is_last else ())]
        yield from (("through the host", size) for size in outside)
        return
    comes: _Way = "through the host" if plan.weights.place == "device" else "to the host"
    is_kept = iter(list_kept(profile, plan, trains_all=trains_all, rank=rank)) if plan.layout.shares_weights else iter(())
    for in_block, size in base.in_order(kinds):
        if not (in_block and plan.layout.shares_weights and not next(is_kept, True)):
            yield comes if in_block and plan.brings_weights else "to the device", size


def _packing_bytes(size: BaseSize, plan: Plan) -> int:
    """Bytes that packing a piece holds beside the piece and its result, as far as torch sees it."""
    beside = PACKED_SIZES[plan.weights.frozen].packing_bytes
    return min(size.num_elements, PIECE_ELEMENTS) * (plan.weights.bytes_per_element if beside is None else beside)


class _Level:
    def __init__(self, *, device: int) -> None:
        self.device, self.host = device, 0
        self.device_peak, self.host_peak, self.together_peak = device, 0, device

    def reach(self, device: int, host: int) -> None:
        self.device_peak, self.host_peak = max(self.device_peak, device), max(self.host_peak, host)
        self.together_peak = max(self.together_peak, device + host)


def _read(
    level: _Level,
    size: BaseSize,
    plan: Plan,
    *,
    file_bytes: int,
    way: _Way,
    packs: bool,
    on_cuda: bool,
    has_homes: bool,
) -> None:
    """One tensor, to its place. has_homes: whether what streams has room already."""
    raw = size.num_elements * file_bytes
    value = size.num_elements * plan.weights.bytes_per_element
    converted = value if file_bytes != plan.weights.bytes_per_element else 0
    stays = packed_bytes(size, plan.weights) if packs else value
    if way != "to the device":
        home = stays if plan.weights.place == "host" and not has_homes else 0
        piece = min(size.num_elements, PIECE_ELEMENTS) * (1 if packs else plan.weights.bytes_per_element)
        made = converted + stays + _packing_bytes(size, plan) if packs else converted
        if way == "through the host":
            level.reach(level.device + stays, level.host + (stays if packs else made or raw))
            level.reach(level.device, level.host + raw + made)
            level.device += stays
            return
        level.reach(level.device, level.host + home + max(raw + made, (stays if packs else made or raw) + piece))
        level.host += home
        return
    if on_cuda:
        made = raw + converted if packs else raw if converted else 0
        level.reach(level.device + made + stays, level.host + raw)
    elif packs:
        level.reach(level.device + converted + stays, level.host + raw)
    elif converted:
        level.reach(level.device + value, level.host + raw)
    else:
        level.reach(level.device + value, level.host)
    level.device += stays
