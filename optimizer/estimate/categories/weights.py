"""Bytes of weights: every trained parameter once in the plan's dtype, frozen ones as they are held, and the buffers.

Where blocks keep their weights elsewhere (``runtime/step/weights.py``), the device holds them only while their blocks
are in use, and their home holds them always. Parameters that several blocks share do not stream: a profile lists them
ahead of the blocks. A home that ranks share (``Plan.shares_homes``) counts in equal parts with all of them, so that their sum is
the machine's.
"""

from collections.abc import Iterator

from optimizer.estimate.categories.tensors import TensorList, list_tensors
from optimizer.formats.ownership import part_of_bytes
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Profile


def estimate_weight_bytes(profile: Profile, plan: WeightsPlan) -> int:
    """Bytes of the whole model's weights, wherever they are."""
    trained_bytes = list_tensors(profile).total_elements * plan.bytes_per_element
    frozen_bytes = profile.total_frozen_bytes(plan.representation)
    return trained_bytes + frozen_bytes + profile.buffer_bytes["fp32" if plan.dtype == "fp32" else "bf16"]


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


def estimate_home_bytes(profile: Profile, plan: Plan, *, trains_all: bool, rank: int) -> dict[str, int]:
    """Bytes of the blocks' weights away from the device that count with a rank, by tier. trains_all: as above."""
    num_bytes = sum(list_streamed_bytes(profile, plan.weights, trains_all=trains_all))
    if plan.shares_homes(trains_all=trains_all):
        num_bytes = part_of_bytes(num_bytes, rank=rank, num_ranks=plan.layout.num_devices)
    return {"host": 0, "disk": 0, "remote": 0, plan.weights.place: num_bytes}


def list_sent(tensors: TensorList, plan: Plan, *, trains_all: bool) -> list[bool]:
    """Flags of the trained tensors, in the model's order: true where their owners send new weights to the other ranks."""
    if not plan.layout.shares_state:
        return [False] * len(tensors.num_elements)
    if not plan.shares_homes(trains_all=trains_all):
        return [True] * len(tensors.num_elements)
    return [not is_there for is_there in is_streamed(tensors, plan.weights, trains_all=trains_all)]


def is_streamed(tensors: TensorList, plan: WeightsPlan, *, trains_all: bool) -> Iterator[bool]:
    """Flags of the trained tensors, in the model's order: true where a tensor has a home of its own."""
    for block in tensors.blocks:
        yield plan.place != "device" and trains_all and 0 <= block < tensors.num_blocks


def list_forward_moves(by_block: tuple[int, ...], *, prefetch: int) -> list[tuple[int, range]]:
    """Moves as each block's forward begins: bytes that go, and the blocks that come. Bytes that are left go afterwards."""
    return _moves(by_block, order=range(len(by_block)), prefetch=prefetch)


def list_backward_moves(by_block: tuple[int, ...], *, prefetch: int) -> list[tuple[int, range]]:
    """Moves as each block's backward begins; in the order of the blocks, though the last comes first."""
    return _moves(by_block, order=range(len(by_block) - 1, -1, -1), prefetch=prefetch)[::-1]


def _moves(by_block: tuple[int, ...], *, order: range, prefetch: int) -> list[tuple[int, range]]:
    moves = []
    for position in range(len(order)):
        gone = by_block[order[position - 1]] if position else 0
        fresh = order[position + prefetch : position + prefetch + 1] if position else order[: prefetch + 1]
        moves.append((gone, fresh))
    return moves
