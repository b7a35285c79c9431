"""Bytes of weights: every trained parameter once in the plan's dtype, frozen ones as they are held, and the buffers.

Where blocks keep their weights elsewhere (``runtime/step/weights.py``), the device holds them only while their blocks
are in use, and their home holds them always. Parameters that several blocks share do not stream: a profile lists them
ahead of the blocks. A home that ranks share (``Plan.shares_homes``) counts in equal parts with those of a
replica, so that their sum is one home. Where ranks share weights out, what a rank's device has of a block only while it runs is
what others keep of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from optimizer.base.errors import InvalidPlan
from optimizer.estimate.categories.tensors import TensorList, list_tensors
from optimizer.formats.ownership import deal_frozen, part_of_bytes
from optimizer.plan.devices.stages import RankStages
from optimizer.plan.plan import Plan
from optimizer.plan.weights import PACKED_SIZES, WeightsPlan
from optimizer.profile.profile import Profile
from optimizer.profile.trained import BaseSize
from optimizer.workload import TrainingWorkload


def estimate_weight_bytes(profile: Profile, plan: WeightsPlan) -> int:
    """Bytes of the whole model's weights, wherever they are."""
    trained_bytes = list_tensors(profile).total_elements * plan.bytes_per_element
    frozen_bytes = profile.total_frozen_bytes(plan.representation)
    return trained_bytes + frozen_bytes + profile.buffer_bytes["fp32" if plan.dtype == "fp32" else "bf16"]


@dataclass(frozen=True, kw_only=True)
class Brought:
    """The weights that come to one rank's device for as long as their block runs, and go."""

    by_block: tuple[int, ...] = ()
    """Bytes; empty where all weights stay."""
    tensors: tuple[tuple[int, ...], ...] = ()
    """Bytes of each tensor, by block, as far as a profile knows them."""
    exchanged: tuple[tuple[int, ...], ...] = ()
    """Bytes of each tensor that ranks send each other, by block: those that this rank keeps, too. Empty where weights come from
    elsewhere than a device."""
    owners: tuple[tuple[int, ...], ...] = ()
    """The place in its replica of the rank that keeps each of these."""
    blocks: tuple[int, ...] = ()
    """Numbers of the blocks where they are not all, as of a rank of a model that is cut."""

    @property
    def num_bytes(self) -> int:
        return sum(self.by_block)


def find_brought(
    profile: Profile, plan: Plan, *, trains_all: bool, rank: int, own: RankStages | None = None
) -> Brought:
    """The weights that come and go on a rank. trains_all: as below. own: of a model that is cut, the rank's. Raises InvalidPlan
    where they would be dealt out and the profile does not know them one by one.
    """
    if not plan.layout.shares_weights:
        by_block = list_streamed_bytes(profile, plan.weights, trains_all=trains_all)
        tensors = list_streamed_tensors(profile, plan.weights, trains_all=trains_all)
        if own is None or not by_block:
            return Brought(by_block=by_block, tensors=tensors)
        return Brought(by_block=own.pick(by_block), tensors=own.pick(tensors), blocks=own.blocks)
    sizes, owners = _deal(profile, plan, trains_all=trains_all)
    place = plan.layout.place_of(rank)
    others = tuple(
        tuple(size for size, owner in zip(*block, strict=True) if owner != place) for block in zip(sizes, owners, strict=True)
    )
    return Brought(
        by_block=tuple(map(sum, others)),
        tensors=others,
        exchanged=tuple(map(tuple, sizes)),
        owners=tuple(map(tuple, owners)),
    )


def list_dealt(profile: Profile, plan: Plan, *, trains_all: bool) -> list[tuple[int, int]]:
    """Bytes and owner of each tensor that ranks send each other when its block is to run; none unless they share weights out."""
    brought = find_brought(profile, plan, trains_all=trains_all, rank=0)
    sizes, owners = chain.from_iterable(brought.exchanged), chain.from_iterable(brought.owners)
    return list(zip(sizes, owners, strict=True))


def list_kept(profile: Profile, plan: Plan, *, trains_all: bool, rank: int) -> list[bool]:
    """Flags of the tensors of all blocks, in the model's order: true where a rank keeps one that ranks share out."""
    _, owners = _deal(profile, plan, trains_all=trains_all)
    return [owner == plan.layout.place_of(rank) for block in owners for owner in block]


def times_brought(plan: Plan, workload: TrainingWorkload) -> int:
    """The number of times in a step that each block's weights come: for forward and backward of each micro-batch, and for the
    forward of the reference where there is one. A block that is recomputed has its weights for its backward.
    """
    return plan.batch.accumulation_steps * (3 if workload.objective == "dpo" else 2)


def _deal(profile: Profile, plan: Plan, *, trains_all: bool) -> tuple[list[list[int]], list[list[int]]]:
    """Bytes of each tensor of each block, and the rank that keeps it (``runtime/ranks/dealt_weights.py``)."""
    num_ranks = plan.layout.num_sharing
    if not trains_all:
        sizes = _list_frozen(profile, plan.weights)
        return sizes, deal_frozen(sizes, num_ranks=num_ranks)
    trained = list_tensors(profile)
    found: list[list[int]] = [[] for _ in range(trained.num_blocks)]
    owners: list[list[int]] = [[] for _ in range(trained.num_blocks)]
    for number, block, owner in zip(trained.num_elements, trained.blocks, trained.owners(num_ranks), strict=True):
        if 0 <= block < trained.num_blocks:
            found[block].append(plan.weights.bytes_per_element * number)
            owners[block].append(owner)
    return found, owners


def _list_frozen(profile: Profile, plan: WeightsPlan) -> list[list[int]]:
    """Bytes of each frozen tensor of each block; of a packed one with its scales. Raises InvalidPlan."""
    held = profile.frozen_bytes(plan.representation).by_block
    blocks = () if profile.base is None else profile.base.by_block
    by_kind = [
        [
            packed_bytes(size, plan) if size.packs and plan.frozen != "same" else size.num_elements * plan.bytes_per_element
            for size in sizes
        ]
        for sizes in blocks
    ]
    if [sum(sizes) for sizes in by_kind] != list(held):
        raise InvalidPlan(
            "plan.layout.data is zero3, which deals frozen tensors out one by one; this model's profile knows only their sum",
            field="plan.layout.data",
            value="zero3",
            allowed="replicated, zero1 or zero2",
        )
    return [by_kind[kind] for kind in profile.tensors.block_kinds]


def packed_bytes(size: BaseSize, plan: WeightsPlan) -> int:
    """Bytes of a matrix as the plan holds it while frozen, scales included."""
    sizes = PACKED_SIZES[plan.frozen]
    return sizes.count_bytes(size.num_elements, num_rows=size.num_scales, bytes_per_element=plan.bytes_per_element)


def list_streamed_bytes(profile: Profile, plan: WeightsPlan, *, trains_all: bool) -> tuple[int, ...]:
    """Bytes that come and go with each block; nothing where all stay on the device.

    trains_all: False under adapters, where what is trained stays.
    """
    if plan.place == "device":
        return ()
    tensors = profile.tensors
    if trains_all:
        by_kind = [sum(size.num_elements for size in sizes) * plan.bytes_per_element for sizes in tensors.by_block]
    else:
        by_kind = list(profile.frozen_bytes(plan.representation).by_block)
    return tuple(by_kind[kind] for kind in tensors.block_kinds)


def list_streamed_tensors(profile: Profile, plan: WeightsPlan, *, trains_all: bool) -> tuple[tuple[int, ...], ...]:
    """Bytes that come and go with each block by tensor, as far as a profile knows them: those that are not trained as
    one.
    """
    if not trains_all:
        return tuple((num_bytes,) for num_bytes in list_streamed_bytes(profile, plan, trains_all=False))
    tensors = profile.tensors
    by_kind = [tuple(size.num_elements * plan.bytes_per_element for size in sizes) for sizes in tensors.by_block]
    return tuple(by_kind[kind] for kind in tensors.block_kinds)


def estimate_home_bytes(
    profile: Profile, plan: Plan, *, trains_all: bool, rank: int, own: RankStages | None = None
) -> dict[str, int]:
    """Bytes of the blocks' weights away from the device that count with a rank, by tier. trains_all, own: as above."""
    by_block = list_streamed_bytes(profile, plan.weights, trains_all=trains_all)
    num_bytes = sum(by_block if own is None or not by_block else own.pick(by_block))
    if plan.shares_homes(trains_all=trains_all):
        num_bytes = part_of_bytes(num_bytes, rank=plan.layout.place_of(rank), num_ranks=plan.layout.num_sharing)
    return {"host": 0, "disk": 0, "remote": 0, plan.weights.place: num_bytes}


def list_sent(tensors: TensorList, plan: Plan, *, trains_all: bool) -> list[bool]:
    """Flags of the trained tensors, in the model's order: true where their owners send new weights to the other ranks."""
    if not plan.layout.shares_state:
        return [False] * len(tensors.num_elements)
    if plan.layout.shares_weights and trains_all:
        return [not 0 <= block < tensors.num_blocks for block in tensors.blocks]
    if not plan.shares_homes(trains_all=trains_all):
        return [True] * len(tensors.num_elements)
    return [not is_there for is_there in is_streamed(tensors, plan.weights, trains_all=trains_all)]


def is_streamed(tensors: TensorList, plan: WeightsPlan, *, trains_all: bool) -> Iterator[bool]:
    """Flags of the trained tensors, in the model's order: true where a tensor has a home of its own."""
    for block in tensors.blocks:
        yield plan.place != "device" and trains_all and 0 <= block < tensors.num_blocks


class WeightsMove(NamedTuple):
    """Blocks whose weights go and come as a block begins, counted among those of the rank."""

    gone: tuple[int, ...]
    coming: tuple[int, ...]


def list_forward_moves(num_blocks: int, *, prefetch: int) -> list[WeightsMove]:
    """Moves as each block's forward begins. What is left goes afterwards."""
    return _list_moves(range(num_blocks), prefetch=prefetch)


def list_backward_moves(num_blocks: int, *, prefetch: int) -> list[WeightsMove]:
    """Moves as each block's backward begins; in the order of the blocks, though the last comes first."""
    return _list_moves(range(num_blocks - 1, -1, -1), prefetch=prefetch)[::-1]


def _list_moves(order: range, *, prefetch: int) -> list[WeightsMove]:
    moves = []
    for position in range(len(order)):
        fresh = order[position + prefetch : position + prefetch + 1] if position else order[: prefetch + 1]
        moves.append(WeightsMove(gone=tuple(order[max(0, position - 1) : position]), coming=tuple(fresh)))
    return moves
