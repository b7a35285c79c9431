"""A model's trained tensors as one flat list, with the block of each: what state, gradients and the update go by. Torch-free."""

import weakref
from dataclasses import dataclass, field

from optimizer.profile.profile import Profile
from optimizer.profile.trained import TensorSize


@dataclass(frozen=True, kw_only=True)
class TensorList:
    """The trained tensors in the model's order, each with its block; -1 before the blocks, ``num_blocks`` after them."""

    sizes: tuple[TensorSize, ...]
    blocks: tuple[int, ...]
    num_elements: tuple[int, ...] = field(repr=False)
    num_blocks: int

    @property
    def total_elements(self) -> int:
        return sum(self.num_elements)


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
