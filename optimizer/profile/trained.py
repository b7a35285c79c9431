"""Sizes of a model's own tensors: those that are trained, one by one, and the bytes of those that are not. Torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TensorSize:
    """One trained tensor."""

    num_elements: int
    is_matrix: bool
    """Two or more dimensions: weight decay applies, and the optimizer takes these first."""
    rows: int = 0
    """The last dimension but one of a matrix; 0 of what is none."""
    columns: int = 0
    """The last dimension of a matrix."""
    row_elements: int = 0
    """Elements in a row of an embedding whose gradient holds only the rows of a batch's tokens. 0: gradients are whole."""
    is_partial: bool = False
    """Ranks that share each block have all of it, and each a part of its gradient."""
    num_parts: int = 1
    """Ranks that share each block have so many parts of it, one each."""


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """Sizes of the trained tensors in the model's order, tied ones once: the optimizer takes them one by one.

    Where a decoder follows an encoder, ``between`` come before the block ``num_before_between``.
    """

    before: tuple[TensorSize, ...]
    """Ahead of the blocks."""
    by_block: tuple[tuple[TensorSize, ...], ...]
    """Distinct blocks."""
    block_kinds: tuple[int, ...]
    """Index in ``by_block`` of each block of the model."""
    after: tuple[TensorSize, ...]
    between: tuple[TensorSize, ...] = ()
    num_before_between: int = 0

    def placed(self) -> list[tuple[int, TensorSize]]:
        """Every tensor of the model with its block: -1 before the blocks; their number after them, and between two stacks."""
        outside = len(self.block_kinds)
        placed = [(-1, size) for size in self.before]
        for block, kind in enumerate(self.block_kinds):
            if block == self.num_before_between:
                placed += [(outside, size) for size in self.between]
            placed += [(block, size) for size in self.by_block[kind]]
        return placed + [(outside, size) for size in self.after]

    def in_order(self) -> list[TensorSize]:
        """Every tensor of the model."""
        return [size for _, size in self.placed()]


@dataclass(frozen=True, kw_only=True)
class FrozenBytes:
    """Bytes of the weights that are not trained, in one representation: those under adapters, packed or not, their scales."""

    outside: int
    """Bytes of what belongs to no block: embedding, final norm, head. Always on the device."""
    by_block: tuple[int, ...]
    """Distinct blocks, in the order of ``Tensors.by_block``. What streams where ``weights.place`` is not the device."""


@dataclass(frozen=True, kw_only=True)
class BaseSize:
    """One tensor of a model as it is without adapters."""

    num_elements: int
    packs: bool = False
    """A matrix that is packed where the plan packs what is frozen."""
    adapts: bool = False
    """It has an adapter."""
    num_scales: int = 0
    """Numbers that scale it in int8, one for each output."""
    num_parts: int = 1
    """Ranks that share each block have so many parts of it, one each."""


@dataclass(frozen=True, kw_only=True)
class BaseSizes:
    """Every tensor of a model as it is without adapters, in the model's order, tied ones once: what is loaded and exported."""

    before: tuple[BaseSize, ...]
    """Ahead of the blocks, and what several blocks share."""
    by_block: tuple[tuple[BaseSize, ...], ...]
    """Distinct blocks, as ``Tensors.by_block``."""
    after: tuple[BaseSize, ...]

    def in_order(self, block_kinds: tuple[int, ...]) -> list[tuple[bool, BaseSize]]:
        """Each tensor of the whole model, with whether it is a block's own."""
        in_blocks = [(True, size) for kind in block_kinds for size in self.by_block[kind]]
        return [*((False, size) for size in self.before), *in_blocks, *((False, size) for size in self.after)]
