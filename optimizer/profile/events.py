"""Notes of a trace, in order: ops, storages that come and go, and where one part of the step ends and the next begins.

Torch-free. Storages are numbered in order of birth; those alive before the first micro-batch (parameters, buffers) are not
numbered, and nothing is noted of them.
"""

from dataclasses import dataclass
from typing import NamedTuple

from optimizer.base.categories import Category, Tier
from optimizer.formats.op_costs import OpKind


class Began(NamedTuple):
    """A part begins, named as the runtime marks it: ``forward`` with a block, ``head and loss``, ..."""

    phase: str
    block: int
    """Number of the block; -1 outside the blocks."""


class Ran(NamedTuple):
    """An op that is not a view."""

    name: str
    kind: OpKind
    flops: int
    read_bytes: int
    written_bytes: int
    scratch_bytes: int = 0
    """Bytes that its kernel holds beside them on the CPU device (``meta_ops/op_scratch.py``)."""
    sides: tuple[int, ...] = ()
    """Sides of attention or a product, as ``op_scratch.Scratch`` has them."""
    convolution: tuple[int, ...] = ()
    """The fields of ``convolution.Convolution``."""
    dtype: str = ""
    """Dtype of the numbers it reads, as ``profile.Op`` has it, and so is the next."""
    form: str = ""


class Viewed(NamedTuple):
    """An op that moves no bytes: a view, or what changes how a tensor shows its own. It costs its dispatch."""


class Allocated(NamedTuple):
    storage: int
    num_bytes: int
    category: Category
    tier: Tier


class Moved(NamedTuple):
    """A storage that from now on counts as another category."""

    storage: int
    category: Category


class Freed(NamedTuple):
    storage: int


class Input(NamedTuple):
    """The storage of the hidden states that a block is given."""

    block: int
    storage: int


class HeldStorage(NamedTuple):
    """A block holds a storage for its backward: one that it was given, or, where it is kept, one that it made."""

    block: int
    storage: int
    is_given: bool


Event = Began | Ran | Viewed | Allocated | Moved | Freed | Input | HeldStorage


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One or two micro-batches, one after the other, in which every block takes the same choice."""

    first: tuple[Event, ...]
    """No parameter has a gradient yet."""
    accumulate: tuple[Event, ...]
    """Gradients are there and are added to; empty where only one micro-batch ran."""
    inputs: tuple[int, ...] = ()
    """Bytes of what a micro-batch of a plain module is given, which a block that is all of it offloads as well."""
    constants: frozenset[int] = frozenset()
    """Bytes of saved tensors that no op made: written in the model's code, and so of one size at every shape."""
