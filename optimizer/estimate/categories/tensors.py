"""A model's trained tensors as one flat list, with the block of each: what state, gradients and the update go by. Torch-free."""

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

from optimizer.plan.optimizer_state import OptimizerStatePlan, split_state
from optimizer.profile.profile import Profile
from optimizer.profile.trained import TensorSize

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TensorList:
    """The trained tensors in the model's order, each with its block; -1 before the blocks, ``num_blocks`` after them."""

    sizes: tuple[TensorSize, ...]
    blocks: tuple[int, ...]
    num_elements: tuple[int, ...] = field(repr=False)
    num_blocks: int
    _kept: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def total_elements(self) -> int:
        return sum(self.num_elements)

    @cached_property
    def sparse(self) -> tuple[TensorSize, ...]:
        """Those whose gradients hold some rows only."""
        return tuple(size for size in self.sizes if size.row_elements)

    @cached_property
    def num_in_blocks(self) -> int:
        return sum(0 <= block < self.num_blocks for block in self.blocks)

    def keep(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` gives, made once: a store for whatever depends on the tensors and the key alone."""
        if key not in self._kept:
            self._kept[key] = make()
        return cast(T, self._kept[key])

    def list_leaving(self, plan: OptimizerStatePlan) -> list[bool]:
        """Of each tensor, whether its state leaves the device."""
        fraction = 0.0 if plan.place == "device" else plan.fraction
        return self.keep(("leaving", fraction), lambda: split_state(plan, self.num_elements))

    def list_staying(self, plan: OptimizerStatePlan) -> list[TensorSize]:
        """Those whose state is on the device."""
        return [size for size, is_away in zip(self.sizes, self.list_leaving(plan), strict=True) if not is_away]


_tensors: dict[int, TensorList] = {}


def list_tensors(profile: Profile) -> TensorList:
    """Made once for each profile, and kept while it lives."""
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
