"""A model's trained tensors as one flat list, with the block of each: what state, gradients and the update go by. Torch-free."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from optimizer.estimate.memo import Memo, Memos
from optimizer.formats.ownership import assign_owners, fullest_rank
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.plan.devices.stages import RankStages
from optimizer.plan.optimizer_state import OptimizerStatePlan, split_state
from optimizer.profile.profile import Profile
from optimizer.profile.trained import TensorSize


@dataclass(frozen=True, kw_only=True)
class TensorList:
    """The trained tensors in the model's order, each with its block; -1 before the blocks, ``num_blocks`` after them."""

    sizes: tuple[TensorSize, ...]
    blocks: tuple[int, ...]
    num_elements: tuple[int, ...] = field(repr=False)
    num_blocks: int
    memos: Memos = field(default_factory=Memos, compare=False, repr=False)
    """Values that other modules keep and that depend on these tensors."""
    _leaving: Memo[float, list[bool]] = field(default_factory=Memo, compare=False, repr=False)
    _owners: Memo[int, tuple[int, ...]] = field(default_factory=Memo, compare=False, repr=False)
    _fullest: Memo[int, int] = field(default_factory=Memo, compare=False, repr=False)
    _owned: Memo[tuple[int, int], "TensorList"] = field(default_factory=Memo, compare=False, repr=False)
    _by_stages: Memo[RankStages, "TensorList"] = field(default_factory=Memo, compare=False, repr=False)

    @cached_property
    def total_elements(self) -> int:
        return sum(self.num_elements)

    @cached_property
    def sparse(self) -> tuple[TensorSize, ...]:
        """Tensors whose gradients hold some rows only."""
        return tuple(size for size in self.sizes if size.row_elements)

    @cached_property
    def num_in_blocks(self) -> int:
        return sum(0 <= block < self.num_blocks for block in self.blocks)

    @cached_property
    def whole(self) -> "TensorList":
        """The same of whole tensors, where ranks have a part of each: what checkpoints hold."""
        if all(size.num_parts == 1 for size in self.sizes):
            return self
        sizes = tuple(replace(size, num_elements=size.num_elements * size.num_parts) for size in self.sizes)
        num_elements = tuple(size.num_elements for size in sizes)
        return TensorList(sizes=sizes, blocks=self.blocks, num_elements=num_elements, num_blocks=self.num_blocks)

    def list_leaving(self, plan: OptimizerStatePlan) -> list[bool]:
        """Flags of the tensors: true where a tensor's state leaves the device."""
        fraction = 0.0 if plan.place == "device" else plan.fraction
        return self._leaving.obtain(fraction, lambda: split_state(plan, self.num_elements))

    def owners(self, num_ranks: int) -> tuple[int, ...]:
        """The rank that owns each tensor, where ranks share the optimizer's state."""
        return self._owners.obtain(num_ranks, lambda: tuple(assign_owners(self.num_elements, num_ranks=num_ranks)))

    def fullest_rank(self, num_ranks: int) -> int:
        """The rank that owns the most elements; of equals the lowest."""
        return self._fullest.obtain(
            num_ranks, lambda: fullest_rank(self.num_elements, self.owners(num_ranks), num_ranks=num_ranks)
        )

    def updated_by(self, rank: int, layout: DeviceLayout) -> "TensorList":
        """The tensors that a rank updates: those that it owns, or all where every rank updates every tensor."""
        if not layout.shares_state:
            return self
        place, number = layout.place_of(rank), layout.num_sharing
        return self._owned.obtain((place, number), lambda: self._pick(place, number))

    def _pick(self, rank: int, num_ranks: int) -> "TensorList":
        return self._take([index for index, owner in enumerate(self.owners(num_ranks)) if owner == rank])

    def of_stages(self, own: RankStages, *, behind: frozenset[int]) -> "TensorList":
        """The tensors that a rank of a cut model keeps. behind: indices of those of no block that come after the last."""

        def is_kept(index: int, block: int) -> bool:
            if 0 <= block < self.num_blocks:
                return block in own.blocks
            return own.is_last if index in behind or block == self.num_blocks else own.is_first

        return self._by_stages.obtain(
            own, lambda: self._take([index for index, block in enumerate(self.blocks) if is_kept(index, block)])
        )

    def _take(self, own: Sequence[int]) -> "TensorList":
        return TensorList(
            sizes=tuple(self.sizes[index] for index in own),
            blocks=tuple(self.blocks[index] for index in own),
            num_elements=tuple(self.num_elements[index] for index in own),
            num_blocks=self.num_blocks,
        )

    def list_staying(self, plan: OptimizerStatePlan) -> list[TensorSize]:
        """Tensors whose state is on the device."""
        return [size for size, is_away in zip(self.sizes, self.list_leaving(plan), strict=True) if not is_away]


_tensors: dict[int, TensorList] = {}


def list_tensors(profile: Profile) -> TensorList:
    """A profile's trained tensors, made once for each profile and kept while it lives."""
    if id(profile) not in _tensors:
        tensors = profile.tensors
        sizes = tensors.placed()
        _tensors[id(profile)] = TensorList(
            sizes=tuple(size for _, size in sizes),
            blocks=tuple(block for block, _ in sizes),
            num_elements=tuple(size.num_elements for _, size in sizes),
            num_blocks=profile.num_blocks,
        )
        weakref.finalize(profile, _tensors.pop, id(profile), None)
    return _tensors[id(profile)]
