"""Deals out to ranks trained tensors, whose optimizer state one rank keeps, frozen ones, and bytes that they hold together.

Torch-free.
"""

from collections.abc import Sequence


def assign_owners(num_elements: Sequence[int], *, num_ranks: int) -> list[int]:
    """The owner of each tensor, by rank from 0; the same on every machine.

    num_elements: of the trained tensors in the model's order. The largest first, each to the rank that has the fewest elements so
    far, and of equals to the lowest (Graham, Bounds on Multiprocessing Timing Anomalies, 1969: at most a third above the best).
    """
    owned = [0] * num_ranks
    owners = [0] * len(num_elements)
    for index in sorted(range(len(num_elements)), key=lambda index: -num_elements[index]):
        rank = min(range(num_ranks), key=lambda rank: owned[rank])
        owners[index] = rank
        owned[rank] += num_elements[index]
    return owners


def deal_frozen(by_block: Sequence[Sequence[int]], *, num_ranks: int) -> list[list[int]]:
    """The rank that keeps each frozen tensor of blocks, where ranks share weights out; as ``by_block``, which has their bytes.

    Block by block in the model's order, the largest first, each to the rank that has the fewest bytes so far, and of equals to
    the lowest: what one rank keeps is never more than the largest tensor above another's, after every block.
    """
    held = [0] * num_ranks
    dealt = []
    for sizes in by_block:
        owners = [0] * len(sizes)
        for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
            rank = min(range(num_ranks), key=lambda rank: held[rank])
            owners[index] = rank
            held[rank] += sizes[index]
        dealt.append(owners)
    return dealt


def fullest_rank(num_elements: Sequence[int], owners: Sequence[int], *, num_ranks: int) -> int:
    """The rank that owns the most elements; of equals the lowest. owners: as ``assign_owners`` has them."""
    owned = [0] * num_ranks
    for owner, size in zip(owners, num_elements, strict=True):
        owned[owner] += size
    return owned.index(max(owned))


def part_of_bytes(num_bytes: int, *, rank: int, num_ranks: int) -> int:
    """A rank's part of bytes that are there once for all: equal to the byte that is left over, which the lowest have."""
    return num_bytes // num_ranks + (rank < num_bytes % num_ranks)
