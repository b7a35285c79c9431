"""From a plan's tensors to what a card and a host really have to hold, with the reasons for each bound. Torch-free.

The allocations of two steps are replayed through a model of torch's allocator, the CUDA context and the libraries' workspaces are
added, and host memory is counted as it is pinned. A replay costs up to a tenth of a second for deep models, so it is made
for plans that are shown, not for each that a search tries.

How far apart the bounds are, and why, is said at the constants below; nothing else widens or narrows an interval.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from optimizer.base.categories import CATEGORIES, CATEGORY_LABELS, Category
from optimizer.base.intervals import ByteInterval
from optimizer.base.units import MIB
from optimizer.estimate.card.allocations import Allocations, HeldAllocation
from optimizer.estimate.card.allocator import AllocatorSettings, Replay, replay
from optimizer.estimate.card.depth import carry_on
from optimizer.estimate.prediction import CardMemory, Contributor, HostMemory, MemoryPart
from optimizer.hardware.cuda_facts import ContextSize, find_context, find_workspaces
from optimizer.hardware.machine import Device
from optimizer.plan.allocator import AllocatorPlan

REPLAY_SHARE = 0.03
"""Share of reserved memory, each way: predicted and real allocations of the same steps, replayed, differ by a median of
0.1 % and at the worst by about this (``docs/experiments.md``): which of two storages of one size goes first is not
always known."""
REPLAY_SEGMENT_BYTES = 20 * MIB
"""One segment beside that share, which is all of the difference in small models."""
MAX_CONTRIBUTORS = 12
UNKNOWN_CONTEXT = ByteInterval(low=130 * MIB, value=450 * MIB, high=1024 * MIB)
"""Context of a card of unknown kind: from the smallest that is in the table to what contexts took before kernels were
loaded lazily (pytorch#107667)."""


class Peaked(Protocol):
    """The part of a prediction that names the peak of its tensors."""

    @property
    def device_peak_bytes(self) -> int: ...
    @property
    def device_peak_low_bytes(self) -> int: ...
    @property
    def device_peak_high_bytes(self) -> int: ...
    @property
    def device_bytes_by_category(self) -> Mapping[str, int]: ...


def card_memory(
    prediction: Peaked, found: "Replayed", *, host: HostMemory, device: Device, torch_version: str
) -> CardMemory:
    """Memory that a prediction's tensors come to on a device. found: what the allocator makes of them."""
    tensors = ByteInterval(
        low=prediction.device_peak_low_bytes,
        value=prediction.device_peak_bytes,
        high=prediction.device_peak_high_bytes,
    )
    memory = CardMemory(
        allocated=tensors,
        reserved=tensors,
        process=tensors,
        host_pinned=host.pinned,
        host_pageable=host.pageable,
        parts=tuple(category_parts(prediction.device_bytes_by_category)),
        contributors=found.contributors,
    )
    return on_a_card(memory, found, device=device, torch_version=torch_version) if device.kind == "cuda" else memory


def on_a_card(memory: CardMemory, found: "Replayed", *, device: Device, torch_version: str) -> CardMemory:
    """Memory of a process on a card. memory: of tensors alone. found: what the allocator makes of them."""
    workspaces = find_workspaces(device, torch_version=torch_version)
    context = find_context(device)
    tensors = memory.allocated
    below = tensors.value - tensors.low + found.peak_bytes - found.peak_low_bytes
    above = tensors.high - tensors.value + found.peak_high_bytes - found.peak_bytes
    held_bytes = max(found.peak_bytes, tensors.value)
    allocated_bytes = max(found.allocated_peak_bytes, held_bytes)
    allocated = ByteInterval(low=tensors.low, value=allocated_bytes, high=allocated_bytes + above)
    spread = int(found.reserved_peak_bytes * REPLAY_SHARE) + REPLAY_SEGMENT_BYTES
    reserved_bytes = max(found.reserved_peak_bytes, allocated_bytes)
    reserved = ByteInterval(
        low=max(tensors.low, reserved_bytes - below - spread),
        value=reserved_bytes,
        high=reserved_bytes + above + spread,
    )
    context_bytes = context.num_bytes if context is not None else UNKNOWN_CONTEXT
    process = reserved + workspaces + context_bytes
    parts = (
        *memory.parts,
        MemoryPart(name="copies under way, kernels' scratch", num_bytes=held_bytes - tensors.value),
        MemoryPart(name="allocator: blocks rounded up", num_bytes=allocated_bytes - held_bytes),
        MemoryPart(name="allocator: gaps and segments", num_bytes=reserved_bytes - allocated_bytes),
        MemoryPart(name="library workspaces", num_bytes=workspaces.value),
        MemoryPart(name="CUDA context", num_bytes=context_bytes.value),
    )
    return replace(
        memory,
        allocated=allocated,
        reserved=reserved,
        process=process,
        releasable_bytes=found.releasable_bytes,
        num_segments=found.num_segments,
        parts=tuple(part for part in parts if part.num_bytes),
        total_bytes=device.total_bytes or device.memory_bytes + workspaces.value + context_bytes.value,
        not_modelled=(*_list_not_modelled(device, context), *found.not_modelled),
    )


def _list_not_modelled(device: Device, context: ContextSize | None) -> Iterator[str]:
    if context is None:
        kind = f"compute capability {device.compute_capability}" if device.compute_capability else "unknown kind"
        yield f"{device.name} is a card of {kind}, whose CUDA context is not in the table; run the probe on it"


def category_parts(bytes_by_category: Mapping[str, int]) -> Iterator[MemoryPart]:
    """Parts by category, in order, of those that hold anything."""
    for category in CATEGORIES:
        num_bytes = bytes_by_category.get(category, 0)
        if num_bytes:
            yield MemoryPart(name=CATEGORY_LABELS[category], num_bytes=num_bytes)


# The replay, of deep models in part.

_NOTHING: Final = Replay(
    allocated_peak_bytes=0, reserved_peak_bytes=0, releasable_bytes=0, num_segments=0, num_retries=0, is_over_cap=False
)


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Storages of one category and op that were made in the same pass, over all blocks."""

    num_storages: int
    num_bytes: int
    blocks: tuple[int, ...]


_Groups = dict[tuple[Category, str, str], _Group]
"""Storages by category, part of the step, and op."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The allocator's answer to two steps."""

    peak_bytes: int
    """Peak of the bytes asked for, with what copies under way and kernels hold."""
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    releasable_bytes: int
    num_segments: int
    contributors: tuple[Contributor, ...]
    peak_low_bytes: int
    peak_high_bytes: int
    """``peak_bytes`` with the least and the most that kernels may hold."""
    not_modelled: tuple[str, ...]


def allocator_settings(plan: AllocatorPlan, device: Device) -> AllocatorSettings | None:
    """Settings of the allocator; None where no allocator keeps what it was given."""
    return AllocatorSettings(expandable_segments=plan.expandable_segments) if device.kind == "cuda" else None


@dataclass(frozen=True, kw_only=True)
class CardLayout:
    """A model, whole or with some of its blocks, as single allocations."""

    kept: tuple[int, ...]
    """The whole model's blocks that are in."""
    list: Callable[[], Allocations]


def replay_layouts(
    whole: CardLayout, *, cuts: tuple[CardLayout, CardLayout] | None, settings: AllocatorSettings | None, peak_in: str
) -> Replayed:
    """Replay a plan's allocations. cuts: a deep model at two shorter depths, which are replayed in its place; None for
    one that is not. settings: None on the CPU device, of which only what is there at the peak is reported.

    peak_in: the part of the step in which the whole model's peak is; cuts whose peak is elsewhere cannot report it.
    """
    num_blocks = len(whole.kept)
    if cuts is None:
        allocations = whole.list()
        contributors = _name_contributors(_group(allocations.at_peak), whole.kept, num_blocks)
        return _as_replayed(allocations, _replay(allocations, settings), contributors)
    lengths = (len(cuts[0].kept), len(cuts[1].kept))

    def carried(shorter: int, longer: int) -> int:
        return max(0, carry_on(shorter, longer, lengths=lengths, num_blocks=num_blocks))

    shorter, longer = (cut.list() for cut in cuts)
    first, last = (_replay(allocations, settings) for allocations in (shorter, longer))
    if {shorter.peak_in, longer.peak_in} == {peak_in}:
        groups = _carry_groups(_group(shorter.at_peak), _group(longer.at_peak), carried)
        contributors = _name_contributors(groups, cuts[1].kept, num_blocks)
    else:
        contributors = _name_contributors(_group(whole.list().at_peak), whole.kept, num_blocks)
    return Replayed(
        peak_bytes=carried(shorter.peak_bytes, longer.peak_bytes),
        allocated_peak_bytes=carried(first.allocated_peak_bytes, last.allocated_peak_bytes),
        reserved_peak_bytes=carried(first.reserved_peak_bytes, last.reserved_peak_bytes),
        releasable_bytes=carried(first.releasable_bytes, last.releasable_bytes),
        num_segments=carried(first.num_segments, last.num_segments),
        contributors=tuple(contributors),
        peak_low_bytes=carried(shorter.peak_low_bytes, longer.peak_low_bytes),
        peak_high_bytes=carried(shorter.peak_high_bytes, longer.peak_high_bytes),
        not_modelled=longer.not_modelled,
    )


def _replay(allocations: Allocations, settings: AllocatorSettings | None) -> Replay:
    return _NOTHING if settings is None else replay(allocations.phases, settings=settings)


def _as_replayed(allocations: Allocations, found: Replay, contributors: Sequence[Contributor]) -> Replayed:
    return Replayed(
        peak_bytes=allocations.peak_bytes,
        allocated_peak_bytes=found.allocated_peak_bytes,
        reserved_peak_bytes=found.reserved_peak_bytes,
        releasable_bytes=found.releasable_bytes,
        num_segments=found.num_segments,
        contributors=tuple(contributors),
        peak_low_bytes=allocations.peak_low_bytes,
        peak_high_bytes=allocations.peak_high_bytes,
        not_modelled=allocations.not_modelled,
    )


def _carry_groups(shorter: _Groups, longer: _Groups, carried: Callable[[int, int], int]) -> _Groups:
    nothing = _Group(num_storages=0, num_bytes=0, blocks=())
    return {
        key: _Group(
            num_storages=carried(shorter.get(key, nothing).num_storages, group.num_storages),
            num_bytes=carried(shorter.get(key, nothing).num_bytes, group.num_bytes),
            blocks=group.blocks,
        )
        for key, group in longer.items()
    }


def _group(held: Sequence[HeldAllocation]) -> _Groups:
    found: dict[tuple[Category, str, str], list[HeldAllocation]] = {}
    for storage in held:
        found.setdefault((storage.category, storage.made_in, storage.op), []).append(storage)
    return {
        key: _Group(
            num_storages=len(storages),
            num_bytes=sum(storage.num_bytes for storage in storages),
            blocks=tuple(sorted({storage.block for storage in storages})),
        )
        for key, storages in found.items()
    }


def _name_contributors(groups: _Groups, kept: Sequence[int], num_blocks: int) -> list[Contributor]:
    """The largest groups. kept: the blocks that were laid out, of so many in the whole model."""
    found = [
        Contributor(
            category=category,
            made_in=_name_blocks(made_in, group.blocks, kept=kept, num_blocks=num_blocks),
            op=op,
            num_storages=group.num_storages,
            num_bytes=group.num_bytes,
        )
        for (category, made_in, op), group in groups.items()
    ]
    return sorted(found, key=lambda one: -one.num_bytes)[:MAX_CONTRIBUTORS]


def _name_blocks(made_in: str, blocks: Sequence[int], *, kept: Sequence[int], num_blocks: int) -> str:
    """``forward of blocks 2 to 5 of 12``; of blocks that were laid out and have no gap between them, whatever was cut out."""
    if blocks[0] < 0:
        return made_in
    if len(blocks) == 1:
        return f"{made_in} of block {kept[blocks[0]] + 1} of {num_blocks}"
    is_run = blocks[-1] - blocks[0] + 1 == len(blocks)
    named = f"blocks {kept[blocks[0]] + 1} to {kept[blocks[-1]] + 1}" if is_run else "several blocks"
    return f"{made_in} of {named} of {num_blocks}"
